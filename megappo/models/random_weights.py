"""Random weights drawn where they lie, for measurements of models that no machine could write to disk."""

from collections.abc import Sequence
from zlib import crc32

import torch
from megatron.core.transformer.module import MegatronModule

from megappo.models.parameters import mapped_parameters, shards_of
from megappo.weights.name_map import VALUE_HEAD, Partition

_STD = 0.02


@torch.no_grad()
def draw_random_weights(chunks: Sequence[MegatronModule]) -> None:
    """Fill the parameters of this rank: matrices from N(0, 0.02), norms with 1, biases and a value head with 0.

    A parameter is drawn from a seed made of its Hugging Face names and its shard, so ranks that hold the same hold
    the same numbers (replicas, the two ends of a tied embedding); layouts differ from each other.
    """
    for chunk in chunks:
        for parameter, mapped in mapped_parameters(chunk):
            if mapped.hugging_face == [VALUE_HEAD]:
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(0.0 if mapped.hugging_face[0].endswith(".bias") else 1.0)
            else:
                shard = 0 if mapped.partition is Partition.replicated else shards_of(mapped).rank
                seed = crc32(f"{mapped.hugging_face} {shard}".encode())
                generator = torch.Generator(device=parameter.device).manual_seed(seed)
                parameter.normal_(std=_STD, generator=generator)
