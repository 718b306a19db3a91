"""The invariants listed in megappo/balance/capped.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.balance.capped import level_under_cap
from megappo.balance.micro_batches import pack
from megappo.balance.partition import imbalance
from megappo.balance.workload import Workload


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 60), st.integers(0, 3), st.sampled_from([0.0, 0.2]))
def test_what_is_found_covers_every_position_under_the_cap(lengths, cap, more, pair):
    tokens = np.array(lengths, dtype=np.int64)
    num_parts = len(pack(tokens, cap)) + more
    parts = level_under_cap(tokens, Workload(pair=pair).costs(tokens), max(num_parts, 1), cap)
    if parts is not None:
        assert len(parts) == max(num_parts, 1)
        assert sorted(position for part in parts for position in part) == list(range(len(lengths)))
        assert all(tokens[part].sum() <= cap for part in parts)


def test_more_tokens_than_fit_are_not_found():
    tokens = np.array([5, 5, 5, 5, 5])
    assert level_under_cap(tokens, tokens.astype(float), 4, 8) is None


def test_equal_cost_gives_way_to_the_cap():
    # Costs 36 and six times 1: equal cost would put all six tokens against the one of eight; six fit under a cap of 8.
    tokens = np.array([8, 1, 1, 1, 1, 1, 1])
    costs = Workload(pair=1.0).costs(tokens)
    assert level_under_cap(tokens, costs, 2, 8) == [[0], [1, 2, 3, 4, 5, 6]]


def test_the_cap_holds_whatever_the_costs():
    # Only 4 + 1 against five ones fits under a cap of 5.
    tokens = np.array([4, 1, 1, 1, 1, 1, 1])
    parts = level_under_cap(tokens, Workload(pair=1.0).costs(tokens), 2, 5)
    assert parts is not None
    assert [tokens[part].sum() for part in parts] == [5, 5]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_twentieth_of_room_is_enough_to_level_the_work(seed):
    lengths = np.clip(np.exp(np.random.default_rng(seed).normal(np.log(1300), 0.8, 512)), 16, 8192).astype(int)
    costs = Workload(pair=2 / 24576).costs(lengths)
    num_parts = int(lengths.sum() / 16384 * 1.05) + 1
    parts = level_under_cap(lengths, costs, num_parts, 16384)
    assert parts is not None
    assert imbalance([costs[part].sum() for part in parts]) < 0.02
