"""How Hugging Face tensors become one Megatron parameter and back, and how either is cut for tensor parallelism.

Shapes: G key/value groups, R query heads per group, D head size, F feed-forward size, H hidden size, V vocabulary.

Invariants (asserted by tests/weights/test_transforms.py):
1. split(merge(tensors), i) has the elements of tensor i in their order, bitwise.
2. Cutting commutes with merging: rank r's shard of the merged parameter is the merge of rank r's shards of the
   Hugging Face tensors. So loading reads slices only, and exporting concatenates split shards.
"""

from collections.abc import Sequence

import torch

from megappo.weights.cuts import shard_range
from megappo.weights.name_map import Partition, Transform


def merge(transform: Transform, tensors: Sequence[torch.Tensor], *, num_groups: int, dim: int = 0) -> torch.Tensor:
    """Join Hugging Face tensors (whole, or one rank's shards) into the Megatron parameter.

    Args:
        tensors: plain, vocabulary [V, H]: one; qkv: query [G*R*D, ...], key and value [G*D, ...]; gate_up: two of
            [F, ...].
        num_groups: G of these tensors (on a shard: groups of the rank).
        dim: where the output features are, which the shapes above have in dim 0.
    """
    dim %= tensors[0].dim()
    if transform in (Transform.plain, Transform.vocabulary):
        (tensor,) = tensors
        return tensor
    if transform is Transform.gate_up:
        return torch.cat(list(tensors), dim)
    grouped = [tensor.unflatten(dim, (num_groups, -1)) for tensor in tensors]
    return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)


def split(
    transform: Transform, parameter: torch.Tensor, part: int, *, num_groups: int, queries_per_group: int
) -> torch.Tensor:
    """Return one of the Hugging Face tensors (by its index in `merge`) of a parameter, whole or a shard, as a view.

    The inverse of `merge`, but for the shape of queries, keys and values, which lie apart: [G, R*D or D, ...].
    """
    if transform in (Transform.plain, Transform.vocabulary):
        return parameter
    if transform is Transform.gate_up:
        return parameter.chunk(2)[part]
    grouped = parameter.view(num_groups, -1, *parameter.shape[1:])
    head_dim = grouped.shape[1] // (queries_per_group + 2)
    heads = grouped.split([queries_per_group * head_dim, head_dim, head_dim], dim=1)
    return heads[part]


def shard(partition: Partition, tensor: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Return rank's part of a Hugging Face tensor under tensor parallelism of `size` ranks (a view)."""
    if partition is Partition.replicated:
        return tensor
    rows = shard_range(tensor.shape[partition.value], rank=rank, size=size)
    return tensor.narrow(partition.value, rows.start, len(rows))
