"""The ports of the loop: what it asks of rollouts, rewards, actor, critic and weight hand-over.

The loop holds metadata and `Ref` handles only. Work is cut into S shards of sequences (S = least common multiple of
the data-parallel sizes of actor and critic); a data-parallel rank works on S / data shards, so a shard never moves.
Implementations: `megappo.cluster` (Ray) and `tests/fakes` (one process).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from megappo.algo.experience import ExperienceTotals, RewardTotals
from megappo.algo.selection import SelectionMoments
from megappo.balance.layout import RankLayout
from megappo.batch.fields import Packed
from megappo.batch.refs import Ref
from megappo.batch.requests import TokenSelection, UpdateRequest
from megappo.batch.stages import BegunBatch, Experience, RolloutBatch, TokenField
from megappo.checkpoint.manifest import FileRecord
from megappo.config.rollout import SamplingConfig
from megappo.data.types import Prompt
from megappo.observability.metrics import Metrics, Stat
from megappo.rewards.types import Reward, Sample


class SequenceInfo(NamedTuple):
    """What the controller knows of one sampled sequence. A tuple, since a step reads tens of thousands of them from the
    engines: a frozen dataclass takes five times as long to unpickle."""

    sequence_id: int
    group_id: int
    prompt_tokens: int
    response_tokens: int
    """Everything after the prompt."""
    finish_reason: str
    policy_version: int
    """Oldest version of the weights that sampled one of its tokens."""
    row: int
    """Row of the prompt in its source."""
    observation_tokens: int = 0
    """Response tokens that were not sampled: a rollout program put them between."""
    counts: Mapping[str, float] = {}
    """What a rollout program has counted, by name."""

    @property
    def length(self) -> int:
        """Tokens of the sequence, prompt included."""
        return self.prompt_tokens + self.response_tokens

    @property
    def sampled_tokens(self) -> int:
        """Response tokens that were sampled."""
        return self.response_tokens - self.observation_tokens


@dataclass(kw_only=True, slots=True, frozen=True)
class Draw:
    """One drawn prompt: a fresh group id and the ids its samples will have."""

    group_id: int
    prompt: Prompt
    sequence_ids: list[int]
    greedy: bool = False
    """Answer greedily whatever the sampling: a baseline rides along with the samples."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FinishedGroup:
    """All samples of one draw, as they left the engine."""

    sequences: list[SequenceInfo]
    samples: Ref[list[Sample]]
    """Their texts, in the same order, for the reward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shard:
    """One shard of a step's sequences."""

    sequence_ids: list[int]
    """In the order in which every result of the shard comes back."""
    pieces: list[Ref[RolloutBatch]]
    """Its sequences in any order, one piece per engine that sampled some."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldRollouts:
    """Sampled tokens brought here from the engines, for a checkpoint."""

    complete: RolloutBatch
    """Sequences of groups that are complete."""
    begun: BegunBatch
    """Groups that an engine was stopped in, all their sequences."""


class RolloutClient(Protocol):
    """The engines. Sampled tokens stay with them until `pack`."""

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        """Yield groups as they finish.

        With `wanted`, the rest is aborted once so many are complete; one that ends in that moment is yielded, too. The
        engines keep what aborted groups have sampled: a later call with the same draw (and ids) goes on from there,
        within the same number of new tokens. One call at a time; the other methods may be called meanwhile from
        another thread.

        Raises:
            EngineError: an engine failed.
        """
        ...

    def pack(self, shards: Sequence[Sequence[int]], *, forget: Sequence[int] = ()) -> list[Shard]:
        """Cut sampled sequences (by id) into shards. The engines forget them, and those to `forget`; others stay."""
        ...

    def read(self, sequence_ids: Sequence[int]) -> HeldRollouts:
        """Bring here what is held of some sequences, complete ones by ascending id; they stay where they are. Called
        between generations, as is `adopt`. Of an unfinished group that has no token yet there is nothing."""
        ...

    def adopt(self, held: HeldRollouts) -> None:
        """Hold what `read` has returned in an earlier run as if it had been sampled in this one."""
        ...

    def take_metrics(self) -> Metrics:
        """How the engines were used since the last call: goodput, idle shares, retries, restarts."""
        ...

    def sleep(self) -> None:
        """Give the devices to the trainers. Called between generations only, as is what takes them back."""
        ...

    def wake_weights(self) -> None:
        """Take back the memory of the weights, which then hold nothing until they are handed over."""
        ...

    def wake_cache(self) -> None:
        """Take back the rest, once the engines have their weights."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoredGroups:
    """What became of the groups of one generation."""

    rewards: dict[int, Reward]
    """By sequence id; one whose `failure` is not None has no score."""
    samples: dict[int, Sample]
    """Texts of the first few groups, by sequence id, for the rollout log."""
    busy_s: float = 0.0
    """Seconds in which the process that scored longest did so."""
    metrics: Metrics = field(default_factory=dict[str, Stat])


class Scoring(Protocol):
    """The scoring of one generation."""

    def submit(self, group: FinishedGroup) -> None:
        """Start scoring; returns at once. Raises as `collect`, when that is known already."""
        ...

    def collect(self) -> ScoredGroups:
        """Wait for all submitted groups; called once.

        Raises:
            RewardError: a reward failed and `reward.on_failure` is `stop`.
            DataError: likewise, and the reward refuses the data row.
            WorkerError: a scoring process cannot go on.
        """
        ...


class RewardClient(Protocol):
    """Scoring beside generation."""

    def begin(self, *, all_texts: bool = False) -> Scoring:
        """Return a handle for the groups of one generation. With `all_texts`, their samples come back from all of them,
        not from the first few."""
        ...


Plan = Sequence[Sequence[Sequence[int]]]
"""[data rank][micro-batch] -> sequence ids."""


class PendingSave(Protocol):
    """A save under way: the state is copied (training may go on), its files may not all be written."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        ...

    def wait(self) -> list[FileRecord]:
        """Wait until every file is on disk; returns their records, relative to the folder of the role.

        Raises:
            CheckpointError: a rank could not write; names rank, file and cause.
        """
        ...


class ActorClient(Protocol):
    """The policy's training workers, the reference policy inside them, and the experience maths beside the tokens."""

    @property
    def layout(self) -> RankLayout: ...

    def compute_log_probs(
        self, shards: Sequence[Shard], plan: Plan, *, reference: bool = False
    ) -> tuple[list[Ref[TokenField]], Metrics]:
        """Log-probs of the sampled tokens, one TokenField per shard; metrics hold the entropy (not for reference)."""
        ...

    def compute_token_rewards(
        self,
        shards: Sequence[Shard],
        *,
        scores: Sequence[np.ndarray],
        truncated: Sequence[np.ndarray],
        old_log_probs: Sequence[Ref[TokenField]] | None,
        ref_log_probs: Sequence[Ref[TokenField]] | None,
        kl_coef: float,
    ) -> tuple[list[Ref[TokenField]], list[RewardTotals]]:
        """Place scores [B] on the last response token, add penalties, subtract KL; per shard, in shard order."""
        ...

    def build_experience(
        self,
        shards: Sequence[Shard],
        *,
        rewards: Sequence[Ref[TokenField]],
        truncated: Sequence[np.ndarray],
        sequence_advantages: Sequence[np.ndarray] | None,
        values: Sequence[Ref[TokenField]] | None,
        old_log_probs: Sequence[Ref[TokenField]] | None,
        ref_log_probs: Sequence[Ref[TokenField]] | None,
        current: Sequence[np.ndarray],
    ) -> tuple[list[Ref[Experience]], list[ExperienceTotals]]:
        """Advantages, returns and correction; `sequence_advantages` is given by estimators of scope `sequence`,
        `current` [B] bool says which sequences the current weights sampled."""
        ...

    def read_sequences(self, batches: Sequence[Ref[Packed]], sequence_ids: Sequence[int]) -> Packed:
        """Bring some sequences of a step here, shard after shard."""
        ...

    def selection_moments(self, experience: Sequence[Ref[Experience]]) -> list[SelectionMoments]:
        """Moments of each shard's loss tokens (`megappo.algo.selection`)."""
        ...

    def selection_keys(
        self, experience: Sequence[Ref[Experience]], selection: TokenSelection, count: int
    ) -> list[np.ndarray]:
        """The `count` best keys of each shard's loss tokens."""
        ...

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        """Run the update phase; one request per data rank. Metrics are merged over ranks."""
        ...

    def offload(self, *, keep_params: bool = False) -> None:
        """Move what the role's `offload` section names out of device memory, the weights only unless `keep_params`.
        What a later call needs comes back by itself."""
        ...

    def save(self, folder: str, *, asynchronous: bool = False) -> PendingSave:
        """Write the role's state into an existing folder; with `asynchronous`, return once it is copied.

        Raises:
            CheckpointError: as `PendingSave.wait`, for what is noticed at once.
        """
        ...

    def load(self, folder: str) -> None: ...

    def save_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder, with the side files of the starting model.

        Raises:
            CheckpointError: a rank cannot write.
        """
        ...

    def weight_checksums(self) -> dict[str, str]:
        """Checksum of every weight by its Hugging Face name; the same on every layout and device."""
        ...


class CriticClient(Protocol):
    """The value model's training workers."""

    @property
    def layout(self) -> RankLayout: ...

    def compute_values(self, shards: Sequence[Shard], plan: Plan) -> tuple[list[Ref[TokenField]], Metrics]:
        """Value of the state before each sampled token, one TokenField per shard."""
        ...

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics: ...

    def offload(self, *, keep_params: bool = False) -> None:
        """As the actor's."""
        ...

    def save(self, folder: str, *, asynchronous: bool = False) -> PendingSave:
        """As the actor's."""
        ...

    def load(self, folder: str) -> None: ...

    def save_hf(self, folder: str) -> None:
        """As the actor's; a value model."""
        ...

    def weight_checksums(self) -> dict[str, str]:
        """As the actor's."""
        ...


class WeightSync(Protocol):
    """The hand-over of actor weights to the engines."""

    def training(self) -> AbstractContextManager[None]:
        """While it is open, the trainer computes: an engine that was restarted waits with its weights for the end."""
        ...

    def push(self, version: int) -> Metrics:
        """Hand the actor's weights to every engine; all then answer with `version`. Raises EngineError otherwise."""
        ...
