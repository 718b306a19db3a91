"""Buckets of whole tensors that travel as one flat run of bytes.

Invariants of a plan (asserted by tests/weights/test_buckets.py):
1. The buckets hold the tensors in the order given, each once.
2. No bucket is larger than the limit, unless it holds a single tensor that is.
3. All tensors of a bucket have one dtype, so every tensor starts at a multiple of its element size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    return getattr(torch, name)


def plan_buckets(tensors: Sequence[TensorMeta], bucket_bytes: int) -> list[BucketMeta]:
    """Cut the tensors, in their order, into buckets of at most `bucket_bytes` (a larger tensor gets its own)."""
    groups: list[list[TensorMeta]] = []
    filled = 0
    for tensor in tensors:
        fits = filled + tensor.num_bytes <= bucket_bytes
        if groups and fits and groups[-1][0].dtype == tensor.dtype:
            groups[-1].append(tensor)
            filled += tensor.num_bytes
        else:
            groups.append([tensor])
            filled = tensor.num_bytes
    return [
        BucketMeta(
            names=[tensor.name for tensor in group],
            shapes=[tensor.shape for tensor in group],
            dtype=group[0].dtype,
            num_bytes=sum(tensor.num_bytes for tensor in group),
        )
        for group in groups
    ]


def open_bucket(bucket: BucketMeta, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a bucket as views of its bytes, `flat` [num_bytes] uint8."""
    tensors: dict[str, torch.Tensor] = {}
    elements = flat.view(torch_dtype(bucket.dtype))
    start = 0
    for name, shape in zip(bucket.names, bucket.shapes):
        stop = start + math.prod(shape)
        tensors[name] = elements[start:stop].view(shape)
        start = stop
    return tensors
