"""FakeRollout, FakeReward, FakeActor, FakeCritic and FakeWeightSync: a bigram policy behind the ports of the loop.

The policy is a table of logits [V, V] (next token given the last one); the critic a table of values [V]. Everything
else is the product's own code: schedule, experience, losses. A Ref is the object itself. `data` > 1 runs the
data-parallel ranks one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
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
from megappo.batch.fields import concat, offsets_of, select
from megappo.batch.refs import Ref
from megappo.batch.requests import MiniBatch, TokenSelection, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.rollout import SamplingConfig
from megappo.controller.ports import Draw, FinishedGroup, Plan, SequenceInfo, Shard
from megappo.observability.metrics import Metrics, maximum, mean, merge
from megappo.rewards.types import Reward, Sample

EOS = 0


def as_ref(value: Any) -> Any:
    """In one process a Ref is the object itself."""
    return value


@dataclass
class FakeAnswer:
    """One response so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version that sampled each token."""
    finish_reason: str | None = None

    def advance(self, last: int, table: torch.Tensor, version: int, sampling: SamplingConfig, random: Any) -> None:
        """Sample one more token; `last` is the one before it."""
        row = torch.log_softmax(table[last] / (sampling.temperature or 1.0), dim=-1).double().numpy()
        greedy = sampling.temperature == 0
        token = int(row.argmax()) if greedy else int(random.choice(len(row), p=np.exp(row) / np.exp(row).sum()))
        self.tokens.append(token)
        self.log_probs.append(float(row[token]))
        self.versions.append(version)
        if token == EOS:
            self.finish_reason = "stop"
        elif len(self.tokens) >= sampling.max_new_tokens:
            self.finish_reason = "length"


@dataclass
class FakeRollout:
    """Samples from its own copy of the table, all sequences one token at a time; the copy moves when weights are
    pushed. What is aborted stays in `begun` and goes on from there."""

    table: torch.Tensor
    version: int = -1
    calls: list[str] = field(default_factory=list)
    stored: dict[int, tuple[Draw, FakeAnswer]] = field(default_factory=dict)
    """Complete sequences, by id."""
    begun: dict[int, FakeAnswer] = field(default_factory=dict)
    """Sequences of aborted groups, by id."""
    generating: bool = False

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        assert self.version >= 0, "generate before the first weight push"
        assert not self.generating, "two calls of generate at a time"
        assert wanted is None or wanted <= len(draws)
        self.calls.append("generate")
        self.generating = True
        randoms = {draw.group_id: np.random.default_rng((seed, draw.group_id)) for draw in draws}
        answers = {number: self.begun.pop(number, FakeAnswer()) for draw in draws for number in draw.sequence_ids}
        under_way, complete = list(reversed(draws)), 0  # engines finish in any order
        while under_way and (wanted is None or complete < wanted):
            for draw in under_way:
                self._advance(draw, answers, sampling, randoms[draw.group_id])
            done = [draw for draw in under_way if all(answers[number].finish_reason for number in draw.sequence_ids)]
            under_way = [draw for draw in under_way if draw not in done]
            complete += len(done)
            for draw in done:
                yield self._finish(draw, answers)
        self.begun |= {number: answers[number] for draw in under_way for number in draw.sequence_ids}
        self.generating = False

    def _advance(self, draw: Draw, answers: dict[int, FakeAnswer], sampling: SamplingConfig, random: Any) -> None:
        sampling = replace(sampling, temperature=0.0) if draw.greedy else sampling
        for answer in (answers[number] for number in draw.sequence_ids):
            if answer.finish_reason is None:
                last = [*draw.prompt.tokens, *answer.tokens][-1]
                answer.advance(last, self.table, self.version, sampling, random)

    def _finish(self, draw: Draw, answers: dict[int, FakeAnswer]) -> FinishedGroup:
        infos, samples = [], []
        for sequence_id in draw.sequence_ids:
            answer = answers[sequence_id]
            reason = answer.finish_reason
            assert reason is not None
            self.stored[sequence_id] = (draw, answer)
            infos.append(
                SequenceInfo(
                    sequence_id=sequence_id,
                    group_id=draw.group_id,
                    prompt_tokens=len(draw.prompt.tokens),
                    response_tokens=len(answer.tokens),
                    finish_reason=reason,
                    policy_version=min(answer.versions),
                    row=draw.prompt.row,
                )
            )
            text = " ".join(map(str, answer.tokens))
            samples.append(Sample(prompt=draw.prompt.text, response=text, answer=None, finish_reason=reason))
        return FinishedGroup(sequences=infos, samples=as_ref(samples))

    def pack(self, shards: Sequence[Sequence[int]], *, forget: Sequence[int] = ()) -> list[Shard]:
        self.calls.append("pack")
        packed = [
            Shard(sequence_ids=list(ids), pieces=[as_ref(self._pack([sequence_id])) for sequence_id in reversed(ids)])
            for ids in shards
        ]
        for sequence_id in (*forget, *(sequence_id for ids in shards for sequence_id in ids)):
            del self.stored[sequence_id]
        return packed

    def _pack(self, sequence_ids: Sequence[int]) -> RolloutBatch:
        draw, answer = self.stored[sequence_ids[0]]
        prompt, response = draw.prompt.tokens, answer.tokens
        return RolloutBatch(
            offsets=offsets_of([len(prompt) + len(response)]),
            tokens=np.array([*prompt, *response], dtype=np.int32),
            response_mask=np.array([False] * len(prompt) + [True] * len(response)),
            rollout_log_probs=np.array([0.0] * len(prompt) + answer.log_probs, dtype=np.float32),
            sequence_ids=np.array(sequence_ids, dtype=np.int64),
            group_ids=np.array([draw.group_id], dtype=np.int64),
        )

    def take_metrics(self) -> Metrics:
        return {}

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_weights(self) -> None:
        self.calls.append("wake_weights")

    def wake_cache(self) -> None:
        self.calls.append("wake_cache")


@dataclass
class FakeReward:
    """Scores the text of each sample with a function."""

    function: Callable[[Sample], Reward]
    pending: list[FinishedGroup] = field(default_factory=list)

    def submit(self, group: FinishedGroup) -> None:
        self.pending.append(group)

    def collect(self) -> tuple[dict[int, Reward], dict[int, Sample]]:
        rewards: dict[int, Reward] = {}
        samples: dict[int, Sample] = {}
        for group in self.pending:
            for info, sample in zip(group.sequences, cast(list[Sample], group.samples)):
                rewards[info.sequence_id], samples[info.sequence_id] = self.function(sample), sample
        self.pending = []
        return rewards, samples


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

    def save(self, folder: str) -> None:
        self.saved.append(folder)
        torch.save(self.table.detach(), f"{folder}/table.pt")

    def load(self, folder: str) -> None:
        with torch.no_grad():
            self.table.copy_(torch.load(f"{folder}/table.pt"))


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

    def read_sequences(self, experience: Sequence[Ref[Experience]], sequence_ids: Sequence[int]) -> Experience:
        whole = concat(cast(list[Experience], experience))
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

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    def push(self, version: int) -> Metrics:
        assert not self.rollout.generating, "a hand-over while engines sample"
        self.rollout.calls.append("push")
        self.actor.phases.append("push")
        self.rollout.table = self.actor.table.detach().clone()
        self.rollout.version = version
        return {"weights/version": maximum(version)}
