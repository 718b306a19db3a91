"""What tells the weights of one model from those of another: a checksum of each tensor, the same on every layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule

from megappo.models.export import iter_export_buckets
from megappo.weights.buckets import open_bucket
from megappo.weights.checksums import word_sum

_BUCKET_BYTES = 256 * 1024**2


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightFacts:
    """One tensor."""

    checksum: str
    """16 hexadecimal digits, over its bytes in the model's own precision."""
    non_finite: int
    """How many of its numbers are NaN or infinite."""


def weight_facts(chunks: Sequence[MegatronModule]) -> dict[str, WeightFacts]:
    """Return the facts of the tensors that this rank sends in an export, by Hugging Face name. All ranks take part."""
    facts: dict[str, WeightFacts] = {}
    for bucket, flat in iter_export_buckets(chunks, _BUCKET_BYTES):
        for name, tensor in open_bucket(bucket, flat).items():
            facts[name] = WeightFacts(
                checksum=f"{word_sum(tensor.reshape(-1).view(torch.uint8)):016x}",
                non_finite=int((~tensor.isfinite()).sum()),
            )
    return facts
