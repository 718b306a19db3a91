"""How Hugging Face tensors become one Megatron parameter and back, and how either is cut for tensor parallelism.

Shapes: G key/value groups, R query heads per group, D head size, F feed-forward size, H hidden size.

Invariants (asserted by tests/weights/test_transforms.py):
1. split(merge(tensors), i) is tensor i, bitwise.
2. Cutting commutes with merging: rank r's shard of the merged parameter is the merge of rank r's shards of the
   Hugging Face tensors. So loading reads slices only, and exporting concatenates split shards.
"""

from collections.abc import Sequence

import torch

from megappo.weights.name_map import Partition, Transform


def merge(transform: Transform, tensors: Sequence[torch.Tensor], *, num_groups: int) -> torch.Tensor:
    """Join Hugging Face tensors (whole, or one rank's shards) into the Megatron parameter.

    Args:
        tensors: plain: one; qkv: query [G*R*D, ...], key [G*D, ...], value [G*D, ...]; gate_up: two of [F, ...].
        num_groups: G of these tensors (on a shard: groups of the rank).
    """
    if transform is Transform.plain:
        (tensor,) = tensors
        return tensor
    if transform is Transform.gate_up:
        return torch.cat(list(tensors))
    grouped = [tensor.view(num_groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def split(
    transform: Transform, parameter: torch.Tensor, part: int, *, num_groups: int, queries_per_group: int
) -> torch.Tensor:
    """Return one of the Hugging Face tensors (by its index in `merge`) of a parameter, whole or a shard.

    The inverse of `merge`. A view of the parameter, except for qkv, whose heads lie apart.
    """
    if transform is Transform.plain:
        return parameter
    if transform is Transform.gate_up:
        return parameter.chunk(2)[part]
    grouped = parameter.view(num_groups, -1, *parameter.shape[1:])
    head_dim = grouped.shape[1] // (queries_per_group + 2)
    heads = grouped.split([queries_per_group * head_dim, head_dim, head_dim], dim=1)
    return heads[part].flatten(0, 1)


def shard(partition: Partition, tensor: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Return rank's part of a Hugging Face tensor under tensor parallelism of `size` ranks (a view)."""
    if partition is Partition.replicated:
        return tensor
    return tensor.chunk(size, dim=partition.value)[rank]
