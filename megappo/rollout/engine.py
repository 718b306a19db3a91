"""The port of a rollout engine: token ids in, token ids and log-probs out, weights by version.

All methods are coroutines, called from one event loop. Every call is bounded by a deadline of the configuration.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megappo.config.cluster import DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.profile import ProfileConfig
from megappo.config.rollout import PauseMode, RolloutConfig, SamplingConfig
from megappo.weights.buckets import BucketMeta
from megappo.weights.checksums import HeldTensor
from megappo.weights.delivery import Delivery


class FinishReason(Enum):
    """Why a response ended."""

    stop = "stop"
    """By an end token, a stop token or a stop string; all tokens up to it are part of the response."""
    length = "length"
    """By sampling.max_new_tokens."""
    abort = "abort"
    """By `RolloutEngine.abort`: it can be continued."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VersionSpan:
    """So many tokens, one after the other, that one version of the weights sampled."""

    version: int
    tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Turn:
    """One call of a rollout program (`megappo.rollout.agents`), within the response that it is part of."""

    observed: int
    """Tokens that the program put behind what there was, before it called: read by the model, not sampled."""
    sampled: int
    """Tokens that the call sampled, behind those."""
    finish_reason: FinishReason
    """Why they ended; abort: the call goes on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramNotes:
    """What a rollout program says of a response that it has finished."""

    # Any: whatever the reward understands.
    extra: dict[str, Any]
    """Goes to the reward, beside the columns of the data row."""
    counts: dict[str, float]
    """By name; their means over sequences become metrics."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledResponse:
    """One response: its tokens (the end token included when it ended by `stop` on one) and their log-probs under
    softmax(logits / temperature) over the full vocabulary.

    An aborted response may have no tokens at all.
    """

    tokens: list[int]
    log_probs: list[float]
    """Of each token; 0 where it was not sampled."""
    finish_reason: FinishReason
    versions: list[VersionSpan]
    """Which weights sampled which tokens, in order; the counts add up to the number of sampled tokens."""
    turns: list[Turn] | None = None
    """The calls of a rollout program, which cover all tokens; None: one call sampled them all."""
    notes: ProgramNotes | None = None
    """Of a finished response of a rollout program."""
    seconds: float = 0.0
    """Time that a rollout program has spent on it."""

    @property
    def calls(self) -> list[Turn]:
        """The calls that sampled it: those of its program, or the one that went on until all tokens were there."""
        if self.turns is not None:
            return self.turns
        return [Turn(observed=0, sampled=len(self.tokens), finish_reason=self.finish_reason)] if self.tokens else []

    @property
    def mask(self) -> list[bool]:
        """Whether each token was sampled."""
        if self.turns is None:
            return [True] * len(self.tokens)
        return [sampled for turn in self.turns for sampled in (*[False] * turn.observed, *[True] * turn.sampled)]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that were sampled."""
        return len(self.tokens) if self.turns is None else sum(turn.sampled for turn in self.turns)

    @property
    def call_start(self) -> int:
        """Where the tokens of the last call begin."""
        return len(self.tokens) - self.turns[-1].sampled if self.turns else 0


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateRequest:
    """Sample `num_samples` responses to one prompt."""

    group_id: int
    prompt_tokens: list[int]
    num_samples: int
    greedy: bool = False
    """Take the likeliest token at every step, whatever the temperature of the call."""
    begun: list[SampledResponse] = field(default_factory=list[SampledResponse])
    """What an earlier call returned for this group, one per sample, or nothing: aborted responses are continued within
    the same number of new tokens as if they had never been interrupted, others are returned as they are."""
    row: int | None = None
    """Row of the data source that the prompt comes from, for errors."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupOutput:
    """All responses to one request and the oldest version of the weights that sampled a token of them (where there is
    no token: the version in use)."""

    group_id: int
    responses: list[SampledResponse]
    policy_version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightGroup:
    """A process group of one weight source (rank 0, in the trainer) and all engine ranks."""

    name: str
    address: str
    port: int
    world_size: int
    rank_offset: int
    """First rank of this engine; its tensor-parallel ranks follow."""
    backend: str
    """gloo or nccl."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSpec:
    """What one engine is made from."""

    config: RolloutConfig
    model: ModelConfig
    device: DeviceKind
    index: int
    """Number of the engine, for names in errors."""
    seed: int
    log_path: Path
    """Where the output of an engine's own process goes."""
    weight_timeout_s: float
    """Deadline of every call of a weight hand-over."""
    pause: PauseMode | None = None
    """What becomes of generation during a hand-over; None: what the engine does best."""
    address: str = "127.0.0.1"
    """Where an engine's server listens: loopback, or the address of its node where others must reach it."""


class Generation(Protocol):
    """The half of an engine that samples."""

    @property
    def at_once(self) -> int | None:
        """Sequences that run at the same time, others taking the place of those that end; None: the engine works batch
        by batch, and wants its share of the prompts in one generate call."""
        ...

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield each group as it finishes, in any order. Raises EngineError when the engine dies or is too late."""
        ...

    async def abort(self) -> None:
        """End all groups under way: the generate calls yield them at once, unfinished samples with finish reason abort
        and what they have so far. Returns when that is done; does nothing where nothing is generated."""
        ...

    async def weight_version(self) -> int:
        """Return the version of the weights in use (0: those of the model folder)."""
        ...


class RolloutEngine(Generation, Protocol):
    """What the loop asks of an engine.

    A weight update is begin_weights -> load_weights for every bucket -> checksums, if asked -> end_weights(version);
    after it every output carries that version. An engine that failed in between must not generate until a later update
    ends well.
    """

    async def start(self) -> None:
        """Start and wait until requests are answered; once per object: after `stop` comes a new one (its output goes to
        the end of its log). Raises EngineError with the last log lines on failure."""
        ...

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a weight group; returns once all members have joined."""
        ...

    async def leave_weight_group(self, name: str) -> None:
        """Leave a weight group, whatever state it is in; nothing happens where it was not joined."""
        ...

    async def held_tensors(self) -> list[HeldTensor]:
        """Return the tensors whose checksums the engine can tell, as it holds them."""
        ...

    async def begin_weights(self) -> None:
        """Pause generation and open a weight update, also after one that failed."""
        ...

    async def load_weights(self, bucket: BucketMeta, *, delivery: Delivery) -> None:
        """Receive one bucket."""
        ...

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksums of held tensors as they are now; those that cannot be told are left out."""
        ...

    async def end_weights(self, version: int) -> None:
        """Close the update, drop cached prefixes, take the version and go on generating."""
        ...

    async def sleep(self) -> None:
        """Release weights and KV cache where the engine can (nothing on CPU)."""
        ...

    async def wake_weights(self) -> None:
        """Take the memory of the weights back; they must be handed over before anything is generated."""
        ...

    async def wake_cache(self) -> None:
        """Take the memory of the KV cache back, after the hand-over: the trainer's copy has then left the device."""
        ...

    async def health(self) -> None:
        """Return if the engine answers. Raises EngineError with its last log lines if it does not."""
        ...

    async def stop(self) -> None:
        """End the engine and all its processes; safe to call twice."""
        ...


@runtime_checkable
class ProfilesItself(Protocol):
    """What an engine may have besides: a profiler of its own, since it works in another process."""

    async def begin_profile(self, folder: Path, prefix: str, config: ProfileConfig) -> None:
        """Profile from now on, into files of the folder whose names begin so."""
        ...

    async def end_profile(self) -> None:
        """Write the profile."""
        ...


EngineFactory = Callable[[EngineSpec], RolloutEngine]
"""What a registry entry is: an engine class, or a function that makes an engine."""
