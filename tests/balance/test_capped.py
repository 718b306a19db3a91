"""The invariants listed in megappo/balance/capped.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.balance.capped import level_under_cap
from megappo.balance.micro_batches import pack
from megappo.balance.partition import imbalance
from megappo.balance.workload import Workload


def level(lengths: list[int], pair: float, cap: int, *, more: int = 0) -> list[list[int]]:
    tokens = np.array(lengths, dtype=np.int64)
    packed = pack(tokens, cap) + [[] for _ in range(more)]
    return level_under_cap(tokens, Workload(pair=pair).costs(tokens), packed, cap)


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 60), st.integers(0, 3), st.sampled_from([0.0, 0.2]))
def test_the_packings_number_of_parts_is_always_enough(lengths, cap, more, pair):
    parts = level(lengths, pair, cap, more=more)
    assert len(parts) == len(pack(lengths, cap)) + more
    assert sorted(position for part in parts for position in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    assert all(sum(lengths[position] for position in part) <= cap for part in parts)
    assert parts == level(lengths, pair, cap, more=more)


def test_equal_cost_gives_way_to_the_cap():
    # Costs 36 and six times 1: equal cost would put all six tokens against the one of eight; six fit under a cap of 8.
    assert sorted(level([8, 1, 1, 1, 1, 1, 1], 1.0, 8)) == [[0], [1, 2, 3, 4, 5, 6]]


def test_the_cap_holds_whatever_the_costs():
    # Only 4 + 1 against five ones fits under a cap of 5.
    lengths = [4, 1, 1, 1, 1, 1, 1]
    assert [sum(lengths[position] for position in part) for part in level(lengths, 1.0, 5)] == [5, 5]


def test_parts_without_any_room_are_filled_exactly():
    # 32 tokens in four parts of 8: the two sixes need the two twos, the fours pair up.
    lengths = [6, 6, 4, 4, 4, 4, 2, 2]
    parts = level(lengths, 1.0, 8)
    assert sorted(sorted(lengths[position] for position in part) for part in parts) == [[2, 6], [2, 6], [4, 4], [4, 4]]


def test_one_long_sequence_goes_for_two_short_ones():
    # Equal cost in two full parts of 12 tokens needs the mix 6 + 2 + 2 + 2 / 4 + 4 + 4 (squares 48 / 48), which no swap
    # of one for one reaches from 6 + 4 + 2 / 4 + 4 + 2 + 2 (squares 56 / 40) under the cap.
    lengths = [6, 4, 2, 4, 4, 2, 2]
    tokens = np.array(lengths)
    parts = level_under_cap(tokens, Workload(pair=1.0).costs(tokens), [[0, 1, 2], [3, 4, 5, 6]], 12)
    assert sorted(sorted(lengths[position] for position in part) for part in parts) == [[2, 2, 2, 6], [4, 4, 4]]


@pytest.mark.parametrize("seed", range(4))
def test_a_fiftieth_of_room_is_enough_to_level_the_work(seed):
    lengths = np.clip(np.exp(np.random.default_rng(seed).normal(np.log(1300), 0.8, 512)), 16, 8192).astype(int)
    costs = Workload(pair=2 / 24576).costs(lengths)
    packed = pack(lengths, 16384)
    packed += [[] for _ in range(int(lengths.sum() / 16384 * 1.02) + 1 - len(packed))]
    parts = level_under_cap(lengths, costs, packed, 16384)
    assert imbalance([costs[part].sum() for part in parts]) < 0.01
    assert max(lengths[part].sum() for part in parts) <= 16384


def test_wide_parts_are_sampled_and_still_level():
    # 4,000 sequences in 3 parts: more slots than the search looks at in one turn.
    lengths = np.random.default_rng(0).integers(1, 2000, 4000)
    parts = level_under_cap(lengths, lengths.astype(float), [[], [], pack(lengths, 10**9)[0]], 10**9)
    assert imbalance([lengths[part].sum() for part in parts]) < 2e-3
