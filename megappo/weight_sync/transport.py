"""What a transport is: the trainer's end of a weight hand-over."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from megappo.device.backend import Backend
from megappo.weights.buckets import BucketMeta

Bucket = tuple[BucketMeta, torch.Tensor]
"""What a bucket holds, and its bytes: uint8 [num_bytes] on the trainer's device."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SenderSpec:
    """One weight source and the engines it feeds."""

    group: str
    """Name of the group that the source and all engine ranks join."""
    address: str
    """The source's own address, where the group meets."""
    port: int
    world_size: int
    """The source (rank 0) and all engine ranks."""
    backend: Backend
    timeout_s: float
    """Deadline of joining and of each bucket."""


class WeightSender(Protocol):
    """Hands the buckets of one source (the first tensor-parallel rank of a pipeline stage) to all engines."""

    def join(self) -> None:
        """Meet the engines; returns once all members have joined."""
        ...

    def send(self, buckets: Iterable[Bucket]) -> int:
        """Send buckets in order, taking the next one when the last is out. Returns the bytes sent."""
        ...

    def close(self) -> None:
        """Leave; safe to call twice."""
        ...


SenderFactory = Callable[[SenderSpec], WeightSender]
"""What a registry entry is: a sender class, or a function that makes a sender."""
