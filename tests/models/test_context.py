"""The split of packed sequences over context-parallel ranks, and the exchange of heads for tokens."""

from itertools import chain
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megappo.config.parallelism import ParallelismConfig
from megappo.models.attention import pack_lengths
from megappo.models.context import ContextShare, gathered_rows, heads_to_tokens, held_positions, tokens_to_heads
from tests.dist_world import DistWorld

CPU = torch.device("cpu")


def test_every_rank_holds_an_early_and_a_late_chunk_of_each_sequence() -> None:
    first, second = (held_positions([8, 4], ContextShare(rank=rank, size=2)) for rank in range(2))
    assert first.tolist() == [0, 1, 6, 7, 8, 11]
    assert second.tolist() == [2, 3, 4, 5, 9, 10]
    assert gathered_rows([8, 4], 2).tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]


def test_lengths_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(AssertionError, match="multiples of twice"):
        held_positions([8, 6], ContextShare(rank=0, size=2))


def test_positions_are_those_in_the_whole_sequence() -> None:
    packed = pack_lengths([8, 4], device=CPU, share=ContextShare(rank=0, size=2))
    assert packed.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_q_padded.tolist() == [0, 8, 12]
    assert packed.max_seqlen_q == 8


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_find_every_token_among_those_of_all_ranks(size: int) -> None:
    lengths = [2 * size * count for count in (20, 1, 3, 19, 50, 38)]
    packed = pack_lengths(lengths, device=CPU, share=ContextShare(rank=1, size=size))
    held = torch.cat([held_positions(lengths, ContextShare(rank=rank, size=size)) for rank in range(size)])
    starts = {sum(lengths[:index]): length for index, length in enumerate(lengths)}
    rows = [held[row].tolist() for bucket in packed.buckets for row in bucket]  # as packed positions
    assert sorted(row[0] for row in rows) == sorted(starts)
    for row in rows:
        length = starts[row[0]]
        assert row[:length] == list(range(row[0], row[0] + length)) and set(row[length:]) <= {row[0] + length - 1}
    entries = torch.tensor(list(chain(*rows)))
    assert torch.equal(entries[packed.restore], held)


def exchange_heads(num_heads: int, num_groups: int) -> list[torch.Tensor]:
    """Outputs of a stand-in for attention, [T / R, H, 5], and gradients of query, key and value, all of this rank."""
    group: Any = parallel_state.get_context_parallel_group()  # Any: Megatron types it as a number, too
    tokens, size, rank = 8, group.size(), group.rank()
    query, key, value = (
        tensor[rank * tokens :][:tokens].clone().requires_grad_()
        for tensor in whole(num_heads, num_groups, tokens * size)
    )
    own_query, own_key, own_value = heads_to_tokens(query, key, value, group)
    repeats = own_query.shape[1] // own_key.shape[1]
    output = own_query * own_key.repeat_interleave(repeats, 1) + own_value.repeat_interleave(repeats, 1)
    output = tokens_to_heads(output, group)
    output.square().sum().backward()
    gradients = [tensor.grad for tensor in (query, key, value) if tensor.grad is not None]
    return [output.detach(), *gradients]


def whole(num_heads: int, num_groups: int, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, 5, generator=generator) for heads in (num_heads, num_groups, num_groups)]


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 2), (6, 3, 2), (4, 1, 4), (8, 2, 4)])
def test_heads_meet_their_own_keys_and_come_back(world: DistWorld, heads: int, groups: int, size: int) -> None:
    results = world.run(exchange_heads, parallelism=ParallelismConfig(context=size), num_heads=heads, num_groups=groups)
    query, key, value = (tensor.requires_grad_() for tensor in whole(heads, groups, 8 * size))
    output = query * key.repeat_interleave(heads // groups, 1) + value.repeat_interleave(heads // groups, 1)
    output.square().sum().backward()
    for index, expected in enumerate((output.detach(), query.grad, key.grad, value.grad)):
        torch.testing.assert_close(torch.cat([result[index] for result in results]), expected)
