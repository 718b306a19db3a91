"""What a transport is: the trainer's end of a weight hand-over."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch

from megappo.device.backend import Backend
from megappo.weights.buckets import BucketMeta

Bucket = tuple[BucketMeta, torch.Tensor]
"""What a bucket holds, and its bytes: uint8 [num_bytes] on the trainer's device."""


class Flow(Enum):
    """How sender and engines keep step."""

    streamed = "streamed"
    """Engines receive each bucket while it is sent, over a group that they joined."""
    handed = "handed"
    """Engines get every bucket by what `send` returned; the next one is sent when they have it."""
    stored = "stored"
    """All buckets are sent, then engines load all of them from where they lie."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SenderSpec:
    """One process of the trainer that sends a weight source, and the engine ranks that it feeds."""

    name: str
    """Of the source and its generation; that of the group, where one is joined."""
    address: str = ""
    """The sender's own address, where a group meets."""
    port: int = 0
    engine_ranks: int
    """All ranks of all engines that take part."""
    folder: Path | None = None
    """Where files are written, in one that stores."""
    files: list[str] = field(default_factory=list[str])
    """One for each bucket."""
    backend: Backend
    timeout_s: float
    """Deadline of joining and of each bucket."""

    def at(self, address: str, port: int) -> "SenderSpec":
        """Return the same with a place to meet."""
        return replace(self, address=address, port=port)


class WeightSender(Protocol):
    """Hands the buckets of one source to all engines that it feeds."""

    def open(self) -> None:
        """Meet the engines, where there is a group; returns once all members have joined."""
        ...

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        """Send one bucket, after the last one.

        Returns:
            For a handed bucket: what each engine rank that this process serves needs to open it.
        """
        ...

    def close(self) -> None:
        """Leave, whatever state the group is in, and give up what is shared; safe to call twice."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Transport:
    """What a registry entry is."""

    flow: Flow
    sender: Callable[[SenderSpec], WeightSender]
    """A sender class, or a function that makes a sender."""
