"""The invariants listed in megappo/balance/micro_batches.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.balance.micro_batches import micro_batch_bound, pack, plan_micro_batches
from megappo.balance.partition import imbalance
from megappo.balance.workload import Workload

LENGTHS = st.lists(st.integers(0, 40), max_size=40)
CAPS = st.integers(1, 50)


def check_cap(lengths: list[int], micro_batches: list[list[int]], cap: int) -> None:
    for chosen in micro_batches:
        assert sum(lengths[position] for position in chosen) <= cap or len(chosen) == 1


@given(LENGTHS, CAPS)
def test_packing_covers_every_position_once_under_the_cap(lengths: list[int], cap: int):
    packed = pack(lengths, cap)
    assert sorted(position for chosen in packed for position in chosen) == list(range(len(lengths)))
    check_cap(lengths, packed, cap)


@given(st.lists(st.integers(1, 40), max_size=40), CAPS)
def test_no_two_packed_micro_batches_fit_into_one(lengths: list[int], cap: int):
    sizes = sorted(sum(lengths[position] for position in chosen) for chosen in pack(lengths, cap))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > cap


@given(LENGTHS, CAPS)
def test_the_bound_is_never_above_the_packing(lengths: list[int], cap: int):
    assert micro_batch_bound(lengths, cap) <= len(pack(lengths, cap))


def test_the_number_comes_from_packing_not_from_tokens_over_cap():
    # ceil(25 / 8) = 4 would put two sequences of 5 into one micro-batch of 10.
    assert sorted(pack([5, 5, 5, 5, 5], 8)) == [[0], [1], [2], [3], [4]]
    assert micro_batch_bound([5, 5, 5, 5, 5], 8) == 4


def test_a_sequence_over_the_cap_runs_alone():
    assert sorted(pack([3, 20, 4], 8)) == [[0, 2], [1]]
    assert micro_batch_bound([3, 20, 4], 8) == 2


def test_an_empty_sequence_never_joins_one_over_the_cap():
    assert sorted(pack([20, 0], 8)) == [[0], [1]]
    (plan,) = plan_micro_batches([[0, 1]], [20, 0], max_tokens=8)
    assert sorted(plan) == [[0], [1]]


def test_micro_batches_are_level_not_filled_to_the_cap():
    # Best fit decreasing alone would make 8 + 8 + 8 of 10, and 10 + 10 + 4 of twelve twos.
    (plan,) = plan_micro_batches([range(12)], [2] * 12, max_tokens=10)
    assert [len(chosen) for chosen in plan] == [4, 4, 4]


def test_a_plan_without_any_room_keeps_the_cap():
    # 3 + 5, 3 + 5, 4 + 4 fill three micro-batches of 8 exactly.
    (plan,) = plan_micro_batches([range(6)], [3, 4, 5, 3, 4, 5], max_tokens=8)
    assert sorted(sum([3, 4, 5, 3, 4, 5][position] for position in chosen) for chosen in plan) == [8, 8, 8]


def lognormal_lengths(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(np.log(1300), 0.8, 1024)
    return np.clip(np.exp(drawn), 16, 9216).astype(int)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("pair", [0.0, 2 / 24576])
def test_sixteen_thousand_token_micro_batches_reach_the_bound_within_a_hundredth(seed, pair):
    lengths, workload = lognormal_lengths(seed), Workload(pair=pair)
    (plan,) = plan_micro_batches([range(1024)], lengths, max_tokens=16384, cost=workload)
    assert len(plan) <= 1.01 * micro_batch_bound(lengths, 16384)
    assert max(lengths[chosen].sum() for chosen in plan) <= 16384
    costs = workload.costs(lengths)
    assert imbalance([costs[chosen].sum() for chosen in plan]) < 0.015


@given(LENGTHS, st.integers(1, 4), CAPS, st.integers(1, 3), st.integers(1, 4))
def test_ranks_run_equal_numbers_of_micro_batches_under_the_cap(lengths, num_ranks, cap, fewest, multiple):
    parts = [list(range(rank, len(lengths), num_ranks)) for rank in range(num_ranks)]
    plan = plan_micro_batches(parts, lengths, max_tokens=cap, min_micro_batches=fewest, multiple_of=multiple)
    counts = {len(rank) for rank in plan}
    assert len(plan) == num_ranks
    assert len(counts) == 1
    assert min(counts) >= fewest
    assert min(counts) % multiple == 0
    for part, rank in zip(parts, plan):
        assert sorted(position for chosen in rank for position in chosen) == sorted(part)
        assert all(sum(lengths[p] for p in chosen) <= cap or len(chosen) == 1 for chosen in rank)


def test_a_rank_with_little_work_gets_explicit_empty_micro_batches():
    plan = plan_micro_batches([[0, 1, 2], [3, 4, 5]], [30, 30, 30, 1, 1, 1], max_tokens=32)
    assert [len(rank) for rank in plan] == [3, 3]
    plan = plan_micro_batches([[0, 1, 2], []], [30, 30, 30], max_tokens=32)
    assert plan[1] == [[], [], []]


def test_interleaved_pipelines_get_a_multiple():
    plan = plan_micro_batches([[0, 1, 2, 3, 4]], [5] * 5, max_tokens=8, min_micro_batches=1, multiple_of=4)
    assert len(plan[0]) == 8


def test_micro_batches_of_a_rank_are_equal_in_tokens():
    lengths = np.random.default_rng(3).integers(20, 400, 64)
    plan = plan_micro_batches([range(64)], lengths, max_tokens=4096, min_micro_batches=4)
    assert imbalance([lengths[chosen].sum() for chosen in plan[0]]) < 0.01


def test_micro_batches_of_no_ranks_are_none():
    assert plan_micro_batches([], [], max_tokens=8) == []


def test_the_bound_counts_sequences_over_the_cap_one_each():
    assert micro_batch_bound([100, 5, 5, 5, 5, 5], 8) == 1 + 4


def test_the_bound_of_empty_sequences_is_one_micro_batch():
    assert micro_batch_bound([0, 0], 8) == 1
    assert micro_batch_bound([], 8) == 0


def test_a_micro_batch_keeps_the_order_of_its_rank():
    plan = plan_micro_batches([[2, 0, 3, 1]], [2, 2, 2, 2], max_tokens=8)
    assert plan == [[[2, 0, 3, 1]]]
