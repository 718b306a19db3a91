"""Buckets of whole tensors that travel as one flat run of bytes.

Invariants of a plan (asserted by tests/weights/test_buckets.py):
1. The buckets hold the tensors each once: those of a bucket in the order given, buckets by their first tensor.
2. No bucket is larger than the limit, unless it holds a single tensor that is.
3. All tensors of a bucket have one dtype, so every tensor starts at a multiple of its element size.
4. Where no tensor of a dtype is larger than a tenth of the limit, all its buckets but one are nine tenths full.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans are made without torch
    import torch

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(kw_only=True, slots=True, frozen=True)
class BucketMeta:
    """What one bucket holds, in order: the bytes of the tensors, one after the other, without gaps."""

    names: list[str]
    """Hugging Face parameter names."""
    shapes: list[list[int]]
    dtype: str
    """One dtype for the bucket: `float32` or `bfloat16`."""
    num_bytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorMeta:
    """A tensor that will be in a bucket."""

    name: str
    """Hugging Face parameter name."""
    shape: list[int]
    dtype: str
    """`float32` or `bfloat16`."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES[self.dtype]


def torch_dtype(name: str) -> "torch.dtype":
    """Return torch's dtype of that name."""
    import torch

    return getattr(torch, name)


def plan_buckets(tensors: Sequence[TensorMeta], bucket_bytes: int) -> list[BucketMeta]:
    """Pack the tensors into buckets of at most `bucket_bytes` (a larger tensor gets its own)."""
    groups: list[list[int]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        groups += _pack([index for index, tensor in enumerate(tensors) if tensor.dtype == dtype], tensors, bucket_bytes)
    return [_bucket([tensors[index] for index in sorted(group)]) for group in sorted(groups, key=min)]


def _pack(chosen: list[int], tensors: Sequence[TensorMeta], bucket_bytes: int) -> list[list[int]]:
    """Best-fit decreasing (Johnson et al. 1974): the largest tensor first, each into the fullest bucket that takes it.
    So a tensor opens a bucket only where it fits into none."""
    sizes = {index: tensors[index].num_bytes for index in chosen}
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (bytes left, group), sorted
    for index in sorted(chosen, key=lambda index: (-sizes[index], index)):
        place = bisect.bisect_left(free, (sizes[index], -1))
        if place == len(free):
            groups.append([index])
            left, group = bucket_bytes - sizes[index], len(groups) - 1
        else:
            left, group = free.pop(place)
            groups[group].append(index)
            left -= sizes[index]
        bisect.insort(free, (left, group))
    return groups


def _bucket(tensors: Sequence[TensorMeta]) -> BucketMeta:
    return BucketMeta(
        names=[tensor.name for tensor in tensors],
        shapes=[tensor.shape for tensor in tensors],
        dtype=tensors[0].dtype,
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
    )


def fewest_buckets(sizes: Sequence[int], bucket_bytes: int) -> int:
    """Return a number of buckets of which no packing of tensors of these bytes needs fewer.

    Tensors larger than a bucket are alone; of tensors larger than 1 / (k + 1) of a bucket it holds at most k
    (Martello and Toth 1990, section 8.3.2, by counting), and no more bytes than it has.
    """
    alone = sum(size > bucket_bytes for size in sizes)
    packed = [size for size in sizes if size <= bucket_bytes]
    bounds = [-(-sum(packed) // bucket_bytes)]
    for most in range(1, 10):
        bounds.append(-(-sum(size * (most + 1) > bucket_bytes for size in packed) // most))
    return alone + max(bounds)


def open_bucket(bucket: BucketMeta, flat: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    """Return the tensors of a bucket as views of its bytes, `flat` [num_bytes] uint8."""
    elements = flat.view(torch_dtype(bucket.dtype))
    return {name: elements[place.start : place.stop].view(shape) for name, shape, place in places(bucket)}


def places(bucket: BucketMeta) -> Iterator[tuple[str, list[int], range]]:
    """Yield name, shape and place of each tensor of a bucket, counted in elements."""
    start = 0
    for name, shape in zip(bucket.names, bucket.shapes):
        place = range(start, start + math.prod(shape))
        yield name, shape, place
        start = place.stop
