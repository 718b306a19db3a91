"""Buckets of whole tensors that travel as one flat run of bytes."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class BucketMeta:
    """What one bucket holds, in order: the bytes of the tensors, one after the other, without gaps."""

    names: list[str]
    """Hugging Face parameter names."""
    shapes: list[list[int]]
    dtype: str
    """One dtype for the bucket: `float32` or `bfloat16`."""
    num_bytes: int
