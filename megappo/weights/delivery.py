"""How a bucket of weights reaches an engine."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupDelivery:
    """Broadcast by rank 0 of a weight group that the engine has joined."""

    group: str


@dataclass(kw_only=True, slots=True, frozen=True)
class SharedDelivery:
    """In memory that the engine's processes can open: one payload of `shared_bucket` for each of its ranks."""

    payloads: list[bytes]


@dataclass(kw_only=True, slots=True, frozen=True)
class FolderDelivery:
    """In a model folder; the bucket stands for all tensors in it, whatever their dtypes."""

    path: Path


Delivery = GroupDelivery | SharedDelivery | FolderDelivery
