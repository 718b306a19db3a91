"""The port of a rollout engine: token ids in, token ids and log-probs out, weights by version.

All methods are coroutines, called from one event loop. Every call is bounded by a deadline of the configuration.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from megappo.config.cluster import DeviceKind
from megappo.config.model import ModelConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.weights.buckets import BucketMeta


class FinishReason(Enum):
    """Why a response ended."""

    stop = "stop"
    length = "length"
    abort = "abort"


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateRequest:
    """Sample `num_samples` responses to one prompt."""

    group_id: int
    prompt_tokens: list[int]
    num_samples: int
    greedy: bool = False
    """Take the likeliest token at every step, whatever the temperature of the call."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledResponse:
    """One response: its tokens (the end token included when it ended by `stop` on one) and their log-probs under
    softmax(logits / temperature) over the full vocabulary."""

    tokens: list[int]
    log_probs: list[float]
    finish_reason: FinishReason


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupOutput:
    """All responses to one request and the version of the weights that sampled them."""

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


class RolloutEngine(Protocol):
    """What the loop asks of an engine.

    A weight update is begin_weights -> load_weights for every bucket -> end_weights(version); after it every output
    carries that version. An engine that failed in between must not generate until a later update ends well.
    """

    async def start(self) -> None:
        """Start and wait until requests are answered. Raises EngineError with the last log lines on failure."""
        ...

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield each group as it finishes, in any order. Raises EngineError when the engine dies or is too late."""
        ...

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a weight group; returns once all members have joined."""
        ...

    async def begin_weights(self) -> None:
        """Pause generation and open a weight update."""
        ...

    async def load_weights(self, bucket: BucketMeta, *, group: str) -> None:
        """Receive one bucket broadcast by rank 0 of the named group."""
        ...

    async def end_weights(self, version: int) -> None:
        """Close the update, drop cached prefixes, take the version and go on generating."""
        ...

    async def weight_version(self) -> int:
        """Return the version of the weights in use (0: those of the model folder)."""
        ...

    async def sleep(self) -> None:
        """Release weights and KV cache where the engine can (nothing on CPU)."""
        ...

    async def wake(self) -> None:
        """Take them back."""
        ...

    async def health(self) -> None:
        """Return if the engine answers. Raises EngineError with its last log lines if it does not."""
        ...

    async def stop(self) -> None:
        """End the engine and all its processes; safe to call twice."""
        ...


EngineFactory = Callable[[EngineSpec], RolloutEngine]
"""What a registry entry is: an engine class, or a function that makes an engine."""
