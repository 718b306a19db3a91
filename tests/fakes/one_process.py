"""FakeReward, FakeActor, FakeCritic and FakeWeightSync: a bigram policy behind the ports of the loop.

The policy is a table of logits [V, V] (next token given the last one); the critic a table of values [V]. Everything
else is the product's own code: schedule, experience, losses. A Ref is the object itself. `data` > 1 runs the
data-parallel ranks one after the other.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import torch

from megappo.algo.experience import ExperienceTotals, RewardTotals, build_experience, compute_token_rewards
from megappo.algo.losses import PolicyLossBatch, ValueLossBatch, compute_policy_loss, compute_value_loss
from megappo.algo.masked import whiten
from megappo.algo.selection import (
    SelectionMoments,
    best_keys,
    compute_selection_moments,
    loss_tokens_of,
    select_tokens,
)
from megappo.balance.layout import RankLayout
from megappo.batch.fields import Packed, concat, select
from megappo.batch.refs import Ref
from megappo.batch.requests import MiniBatch, TokenSelection, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.checkpoint.manifest import FileRecord, record_files
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.rollout import PauseMode
from megappo.controller.ports import FinishedGroup, PendingSave, Plan, ScoredGroups, Shard
from megappo.errors import DamagedCheckpointError
from megappo.observability.metrics import Metrics, maximum, mean, merge
from megappo.rewards.types import Reward, Sample
from megappo.weights.checksums import checksum
from tests.fakes.bigram_rollout import FakeRollout, as_ref


@dataclass
class FakeReward:
    """Scores the text of each sample with a function."""

    function: Callable[[Sample], Reward]

    def begin(self, *, all_texts: bool = False) -> "FakeScoring":
        return FakeScoring(self.function)


@dataclass
class FakeScoring:
    """The groups of one generation."""

    function: Callable[[Sample], Reward]
    groups: list[FinishedGroup] = field(default_factory=list)

    def submit(self, group: FinishedGroup) -> None:
        self.groups.append(group)

    def collect(self) -> ScoredGroups:
        samples = {
            info.sequence_id: sample
            for group in self.groups
            for info, sample in zip(group.sequences, cast(list[Sample], group.samples))
        }
        return ScoredGroups(rewards={key: self.function(sample) for key, sample in samples.items()}, samples=samples)


def open_shard(shard: Shard) -> RolloutBatch:
    """Return a shard's sequences in its order."""
    batch = concat(cast(list[RolloutBatch], shard.pieces))
    position = {int(sequence_id): index for index, sequence_id in enumerate(batch.sequence_ids)}
    return select(batch, [position[sequence_id] for sequence_id in shard.sequence_ids])


def per_token_field(batch: RolloutBatch, values: torch.Tensor) -> TokenField:
    """Return values [N] with zeros off the response mask."""
    masked = np.where(batch.response_mask, values.detach().float().numpy(), np.float32(0))
    return TokenField(offsets=batch.offsets, values=masked.astype(np.float32), sequence_ids=batch.sequence_ids)


def previous_tokens(batch: RolloutBatch | Experience) -> torch.Tensor:
    """Token before each token, [N]; the first token of a sequence gets itself."""
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))
    previous = torch.roll(tokens, 1)
    first = torch.from_numpy(batch.offsets[:-1])
    previous[first] = tokens[first]
    return previous


class FakeTrainer:
    """Update loop shared by actor and critic: plain SGD on one table, gradients summed over the ranks."""

    def __init__(self, table: torch.Tensor, *, data: int, lr: float, algorithm: AlgorithmConfig) -> None:
        self.table = table.clone().requires_grad_()
        self.layout = RankLayout(data=data)
        self.algorithm = algorithm
        self.lr = lr
        self.updates = 0
        self.is_first_step = True
        self.phases: list[str] = []
        """Passes, updates and offloads, in order."""
        self.saved: list[str] = []
        self.gate = Event()
        """Asynchronous saves are not done before it is open."""

    def mine(self, items: Sequence[Any], rank: int) -> list[Any]:
        share = len(items) // self.layout.data
        return list(items[rank * share : (rank + 1) * share])

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        self.updates += 1
        self.phases.append("update")
        batches = [concat(cast(list[Experience], self.mine(experience, rank))) for rank in range(self.layout.data)]
        metrics: list[Metrics] = []
        for epoch in range(requests[0].epochs):
            for index in range(len(requests[0].mini_batches)):
                self.is_first_step = epoch == index == 0
                self.table.grad = None
                for batch, request in zip(batches, requests):
                    metrics += self._accumulate(batch, request, request.mini_batches[index])
                with torch.no_grad():
                    if self.table.grad is not None:
                        self.table -= self.lr * self.table.grad
        return merge(metrics)

    def _accumulate(self, batch: Experience, request: UpdateRequest, mini_batch: MiniBatch) -> list[Metrics]:
        position = {int(sequence_id): index for index, sequence_id in enumerate(batch.sequence_ids)}
        metrics = []
        for ids in mini_batch.micro_batches:
            if not ids:
                continue
            part = select(batch, [position[sequence_id] for sequence_id in ids])
            weights = np.repeat([mini_batch.loss_weights[sequence_id] for sequence_id in ids], part.lengths)
            loss, found = self.loss(part, torch.from_numpy(weights.astype(np.float32)), request)
            loss.backward()
            metrics.append(found)
        return metrics

    def loss(self, part: Experience, weights: torch.Tensor, request: UpdateRequest) -> tuple[torch.Tensor, Metrics]:
        raise NotImplementedError

    def offload(self, *, keep_params: bool = False) -> None:
        self.phases.append("offload all but weights" if keep_params else "offload")

    def save(self, folder: str, *, asynchronous: bool = False) -> PendingSave:
        self.saved.append(folder)
        return FakeSave(Path(folder), self.table.detach().clone(), self.gate if asynchronous else None)

    def save_hf(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.table.detach(), f"{folder}/model.pt")

    def weight_checksums(self) -> dict[str, str]:
        return {"table": checksum(self.table)}

    def load(self, folder: str) -> None:
        try:
            table = torch.load(f"{folder}/table.distcp")
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise DamagedCheckpointError(f"{folder}/table.distcp: {error}") from error
        with torch.no_grad():
            self.table.copy_(table)


@dataclass
class FakeSave:
    """A save under way: its file is written when somebody waits for it, or finds that the gate is open."""

    folder: Path
    table: torch.Tensor
    gate: Event | None

    def done(self) -> bool:
        return self.gate is None or self.gate.is_set()

    def wait(self) -> list[FileRecord]:
        assert self.gate is None or self.gate.wait(60)
        torch.save(self.table, self.folder / "table.distcp")
        return record_files(self.folder, [self.folder / "table.distcp"])


class FakeActor(FakeTrainer):
    """A bigram policy with a frozen reference."""

    def __init__(self, table: torch.Tensor, *, data: int, lr: float, algorithm: AlgorithmConfig) -> None:
        super().__init__(table, data=data, lr=lr, algorithm=algorithm)
        self.reference = table.clone()

    def log_probs_of(self, batch: RolloutBatch | Experience, table: torch.Tensor) -> torch.Tensor:
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        return torch.log_softmax(table, dim=-1)[previous_tokens(batch), tokens]

    def compute_log_probs(
        self, shards: Sequence[Shard], plan: Plan, *, reference: bool = False
    ) -> tuple[list[Ref[TokenField]], Metrics]:
        self.phases.append("log-probs")
        planned = sorted(sequence_id for rank in plan for ids in rank for sequence_id in ids)
        assert planned == sorted(sequence_id for shard in shards for sequence_id in shard.sequence_ids)
        table = self.reference if reference else self.table
        batches = [open_shard(shard) for shard in shards]
        fields = [per_token_field(batch, self.log_probs_of(batch, table)) for batch in batches]
        return [as_ref(item) for item in fields], {} if reference else {"actor/entropy/mean": mean(1.0, 1)}

    def compute_token_rewards(
        self, shards: Sequence[Shard], *, kl_coef: float, **per_shard: Sequence[Any] | None
    ) -> tuple[list[Ref[TokenField]], list[RewardTotals]]:
        results = [
            compute_token_rewards(open_shard(shard), algorithm=self.algorithm, kl_coef=kl_coef, **at(per_shard, index))
            for index, shard in enumerate(shards)
        ]
        return [as_ref(rewards) for rewards, _ in results], [totals for _, totals in results]

    def build_experience(
        self, shards: Sequence[Shard], **per_shard: Sequence[Any] | None
    ) -> tuple[list[Ref[Experience]], list[ExperienceTotals]]:
        results = [
            build_experience(open_shard(shard), algorithm=self.algorithm, **at(per_shard, index))
            for index, shard in enumerate(shards)
        ]
        return [as_ref(experience) for experience, _ in results], [totals for _, totals in results]

    def read_sequences(self, batches: Sequence[Ref[Packed]], sequence_ids: Sequence[int]) -> Packed:
        self.phases.append("read sequences")
        whole = concat(cast(list[Packed], batches))
        return select(whole, np.flatnonzero(np.isin(whole.sequence_ids, list(sequence_ids))))

    def selection_moments(self, experience: Sequence[Ref[Experience]]) -> list[SelectionMoments]:
        return [compute_selection_moments(loss_tokens_of(part)) for part in cast(list[Experience], experience)]

    def selection_keys(
        self, experience: Sequence[Ref[Experience]], selection: TokenSelection, count: int
    ) -> list[np.ndarray]:
        parts = cast(list[Experience], experience)
        return [best_keys(loss_tokens_of(part), selection, self.algorithm, count=count) for part in parts]

    def loss(self, part: Experience, weights: torch.Tensor, request: UpdateRequest) -> tuple[torch.Tensor, Metrics]:
        selected = None
        if request.selection is not None:
            selected = torch.from_numpy(part.loss_mask.copy())
            chosen = select_tokens(loss_tokens_of(part), request.selection, self.algorithm)
            selected[selected.clone()] = torch.from_numpy(chosen)
        batch = PolicyLossBatch(
            selected=selected,
            offsets=torch.from_numpy(part.offsets),
            loss_mask=torch.from_numpy(part.loss_mask),
            loss_weights=weights,
            advantages=torch.from_numpy(whiten(part.advantages, request.whitening).astype(np.float32)),
            old_log_probs=as_tensor(part.old_log_probs),
            ref_log_probs=as_tensor(part.ref_log_probs),
            rollout_log_probs=as_tensor(part.rollout_log_probs),
            correction_weights=as_tensor(part.correction_weights),
            is_first_step=self.is_first_step,
        )
        output = compute_policy_loss(self.log_probs_of(part, self.table), batch, self.algorithm)
        return output.loss, output.metrics


class FakeCritic(FakeTrainer):
    """Value of the last token, from a table [V]."""

    def compute_values(self, shards: Sequence[Shard], plan: Plan) -> tuple[list[Ref[TokenField]], Metrics]:
        self.phases.append("values")
        batches = [open_shard(shard) for shard in shards]
        return [as_ref(per_token_field(batch, self.table[previous_tokens(batch)])) for batch in batches], {}

    def loss(self, part: Experience, weights: torch.Tensor, request: UpdateRequest) -> tuple[torch.Tensor, Metrics]:
        assert part.values is not None and part.returns is not None
        batch = ValueLossBatch(
            loss_mask=torch.from_numpy(part.loss_mask),
            loss_weights=weights,
            old_values=torch.from_numpy(part.values),
            returns=torch.from_numpy(part.returns),
        )
        output = compute_value_loss(self.table[previous_tokens(part)], batch, self.algorithm)
        return output.loss, output.metrics


def as_tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


def at(per_shard: dict[str, Sequence[Any] | None], index: int) -> dict[str, Any]:
    """Return the arguments of one shard."""
    return {name: None if values is None else values[index] for name, values in per_shard.items()}


@dataclass
class FakeWeightSync:
    """Copies the actor's table into the rollout."""

    actor: FakeActor
    rollout: FakeRollout
    pause: PauseMode = PauseMode.wait

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    def push(self, version: int) -> Metrics:
        assert self.pause is not PauseMode.wait or not self.rollout.generating, "a hand-over while engines sample"
        self.rollout.calls.append("push")
        self.actor.phases.append("push")
        self.rollout.table = self.actor.table.detach().clone()
        self.rollout.version = version
        return {"weights/version": maximum(version)}
