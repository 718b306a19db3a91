"""The invariants listed in megappo/balance/partition.py."""

from collections.abc import Sequence
from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.balance.partition import imbalance, partition

COSTS = st.lists(st.integers(0, 5000), max_size=80)
PARTS = st.integers(1, 9)


def totals(costs: Sequence[float] | np.ndarray, parts: list[list[int]]) -> list[float]:
    return [float(sum(costs[position] for position in part)) for part in parts]


def lognormal_costs(count: int, seed: int = 0) -> np.ndarray:
    lengths = 512 + np.clip(np.exp(np.random.default_rng(seed).normal(np.log(2048), 0.9, count)), 16, 16384)
    return 24576 * lengths + lengths**2


@given(COSTS, PARTS, st.booleans())
def test_every_position_is_in_exactly_one_part(costs: list[int], num_parts: int, equal_counts: bool):
    parts = partition(costs, num_parts, equal_counts=equal_counts)
    assert len(parts) == num_parts
    assert sorted(position for part in parts for position in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)


@given(st.lists(st.integers(0, 5000), max_size=300), PARTS)
def test_equal_counts_differ_by_at_most_one(costs: list[int], num_parts: int):
    sizes = [len(part) for part in partition(costs, num_parts, equal_counts=True)]
    assert max(sizes) - min(sizes) <= 1


@given(COSTS, PARTS, st.booleans())
def test_the_same_costs_give_the_same_partition(costs: list[int], num_parts: int, equal_counts: bool):
    first = partition(costs, num_parts, equal_counts=equal_counts)
    assert first == partition(np.array(costs, dtype=np.float64), num_parts, equal_counts=equal_counts)


@given(COSTS, PARTS)
def test_free_counts_are_never_worse_than_dealing_longest_first(costs: list[int], num_parts: int):
    dealt = [0] * num_parts
    for cost in sorted(costs, reverse=True):
        dealt[dealt.index(min(dealt))] += cost
    assert max(totals(costs, partition(costs, num_parts, equal_counts=False))) <= max(dealt)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
def test_free_counts_stay_within_four_thirds_of_the_best_partition(costs: list[int], num_parts: int):
    best = min(
        max(sum(cost for cost, part in zip(costs, labels) if part == chosen) for chosen in range(num_parts))
        for labels in product(range(num_parts), repeat=len(costs))
    )
    assert max(totals(costs, partition(costs, num_parts, equal_counts=False))) <= best * 4 / 3


@pytest.mark.parametrize("equal_counts", [True, False])
@pytest.mark.parametrize(("count", "num_parts"), [(7, 4), (3, 4), (0, 4), (1, 1), (129, 128)])
def test_remainders_and_fewer_sequences_than_ranks_are_split(count: int, num_parts: int, equal_counts: bool):
    parts = partition(np.arange(10, 10 + count), num_parts, equal_counts=equal_counts)
    assert sorted(chain.from_iterable(parts)) == list(range(count))
    if count <= num_parts:
        assert max(len(part) for part in parts) <= 1


def test_costs_of_zero_keep_the_counts_equal():
    sizes = sorted(len(part) for part in partition([0] * 10, 4, equal_counts=True))
    assert sizes == [2, 2, 3, 3]


def test_many_sequences_per_rank_balance_to_a_ten_thousandth():
    costs = lognormal_costs(4096)
    assert imbalance(totals(costs, partition(costs, 16, equal_counts=True))) < 1e-4


@pytest.mark.parametrize(("equal_counts", "limit"), [(True, 0.06), (False, 0.01)])
def test_eight_sequences_per_rank_balance_within_the_limit(equal_counts: bool, limit: float):
    costs = lognormal_costs(8192)
    assert imbalance(totals(costs, partition(costs, 1024, equal_counts=equal_counts))) < limit


def test_differencing_beats_dealing_in_order_on_a_hand_computed_case():
    # 4, 5, 6, 7, 8 on two ranks: 8 + 7 against 6 + 5 + 4 is exact; longest first alone gives 17 against 13.
    assert sorted(totals([4, 5, 6, 7, 8], partition([4, 5, 6, 7, 8], 2, equal_counts=False))) == [15, 15]


def test_imbalance_is_max_over_mean_minus_one_with_empty_ranks_counted():
    assert imbalance([30.0, 10.0, 0.0, 0.0]) == pytest.approx(2.0)
    assert imbalance([0.0, 0.0]) == 0.0
