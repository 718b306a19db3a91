"""Merging, splitting and cutting, by brute force over single rows.

Shapes: G key/value groups, R query heads per group, D head size.
"""

import pytest
import torch

from megappo.weights.name_map import Partition, Transform
from megappo.weights.transforms import merge, shard, shard_range, split

HIDDEN = 16


def heads(*labels: float, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, HIDDEN] filled per head with its label."""
    return torch.cat([torch.full((head_dim, HIDDEN), label) for label in labels])


def labels_of(tensor: torch.Tensor, head_dim: int) -> list[float]:
    blocks = tensor.view(-1, head_dim, *tensor.shape[1:])
    assert all(bool((block == block.flatten()[0]).all()) for block in blocks)
    return [float(block.flatten()[0]) for block in blocks]


def test_qkv_is_grouped_by_key_value_head_and_head_dim_is_not_hidden_over_heads() -> None:
    # 4 query heads, 2 key/value heads of size 8 (4 * 8 = 32, not 16): query head i holds i, key 100 + j, value 200 + j.
    query, key, value = heads(0, 1, 2, 3, head_dim=8), heads(100, 101, head_dim=8), heads(200, 201, head_dim=8)
    fused = merge(Transform.qkv, [query, key, value], num_groups=2)
    assert fused.shape == (64, HIDDEN)
    assert labels_of(fused, 8) == [0, 1, 100, 200, 2, 3, 101, 201]
    for part, expected in enumerate([query, key, value]):
        found = split(Transform.qkv, fused, part, num_groups=2, queries_per_group=2)
        assert torch.equal(found.flatten(0, 1), expected)


def test_every_rank_holds_whole_groups_of_a_fused_qkv() -> None:
    query, key, value = heads(0, 1, 2, 3, head_dim=8), heads(100, 101, head_dim=8), heads(200, 201, head_dim=8)
    for rank, expected in enumerate([[0, 1, 100, 200], [2, 3, 101, 201]]):
        parts = [shard(Partition.column, tensor, rank=rank, size=2) for tensor in (query, key, value)]
        assert labels_of(merge(Transform.qkv, parts, num_groups=1), 8) == expected


def test_biases_are_fused_like_weights() -> None:
    bias = [torch.arange(8.0), 100 + torch.arange(4.0), 200 + torch.arange(4.0)]  # 4 query heads of 2, 2 groups
    fused = merge(Transform.qkv, bias, num_groups=2)
    assert fused.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert split(Transform.qkv, fused, 2, num_groups=2, queries_per_group=2).flatten().tolist() == [200, 201, 202, 203]


def test_features_are_fused_in_their_dim_as_rows_are() -> None:
    rows = [torch.randn(8, 3), torch.randn(4, 3), torch.randn(4, 3)]
    for transform, tensors in ((Transform.qkv, rows), (Transform.gate_up, rows[:2]), (Transform.plain, rows[:1])):
        fused = merge(transform, [tensor.t() for tensor in tensors], num_groups=2, dim=-1)
        assert torch.equal(fused.t(), merge(transform, tensors, num_groups=2))


def test_gate_and_up_are_cut_each() -> None:
    gate, up = torch.arange(8.0)[:, None], torch.arange(100.0, 108.0)[:, None]
    assert merge(Transform.gate_up, [gate, up], num_groups=1).flatten().tolist() == [*range(8), *range(100, 108)]
    for rank, expected in enumerate([[0, 1, 2, 3, 100, 101, 102, 103], [4, 5, 6, 7, 104, 105, 106, 107]]):
        parts = [shard(Partition.column, tensor, rank=rank, size=2) for tensor in (gate, up)]
        fused = merge(Transform.gate_up, parts, num_groups=1)
        assert fused.flatten().tolist() == expected
        assert split(Transform.gate_up, fused, 1, num_groups=1, queries_per_group=1).flatten().tolist() == expected[4:]


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("queries_per_group", [1, 3])
@pytest.mark.parametrize("head_dim", [1, 5])
def test_merge_and_split_move_every_row_to_where_a_loop_does(
    groups: int, queries_per_group: int, head_dim: int
) -> None:
    counts = [groups * queries_per_group, groups, groups]
    query, key, value = (torch.randn(count * head_dim, 3) for count in counts)
    rows = []
    for group in range(groups):
        for head in range(group * queries_per_group, (group + 1) * queries_per_group):
            rows += [query[head * head_dim + element] for element in range(head_dim)]
        rows += [key[group * head_dim + element] for element in range(head_dim)]
        rows += [value[group * head_dim + element] for element in range(head_dim)]
    fused = merge(Transform.qkv, [query, key, value], num_groups=groups)
    assert torch.equal(fused, torch.stack(rows))
    for part, expected in enumerate([query, key, value]):
        again = split(Transform.qkv, fused, part, num_groups=groups, queries_per_group=queries_per_group).flatten(0, 1)
        assert torch.equal(again, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("partition", "dim"), [(Partition.column, 0), (Partition.row, 1)])
def test_shards_put_together_are_the_tensor(partition: Partition, dim: int, size: int) -> None:
    tensor = torch.randn(8, 12)
    shards = [shard(partition, tensor, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(torch.cat(shards, dim=dim), tensor)


def test_rows_and_columns_are_cut_where_megatron_cuts_them() -> None:
    tensor = torch.arange(8.0).view(4, 2)
    assert shard(Partition.column, tensor, rank=1, size=2).tolist() == [[4, 5], [6, 7]]
    assert shard(Partition.row, tensor, rank=1, size=2).tolist() == [[1], [3], [5], [7]]
    assert shard(Partition.replicated, tensor, rank=1, size=2) is tensor


@pytest.mark.parametrize(("length", "size", "expected"), [(8, 2, [4, 4]), (7, 2, [4, 3]), (5, 4, [2, 2, 1, 0])])
def test_shards_are_equal_but_for_the_end(length: int, size: int, expected: list[int]) -> None:
    ranges = [shard_range(length, rank=rank, size=size) for rank in range(size)]
    assert [len(held) for held in ranges] == expected
    assert [index for held in ranges for index in held] == list(range(length))
    whole = torch.arange(length)[:, None]
    parts = [shard(Partition.column, whole, rank=rank, size=size) for rank in range(size)]
    assert torch.equal(torch.cat(parts), whole)
