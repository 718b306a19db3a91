"""The invariants listed in megappo/balance/schedule.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.balance.schedule import BatchSchedule, build_batch_schedule, rank_parts, rank_shards
from megappo.balance.workload import Workload


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths and group ids of groups of unequal sizes, in any order."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=8))
    group_ids = [7 * group for group, size in enumerate(sizes) for _ in range(size)]
    order = draw(st.permutations(range(len(group_ids))))
    lengths = draw(st.lists(st.integers(1, 200), min_size=len(group_ids), max_size=len(group_ids)))
    return lengths, [group_ids[position] for position in order]


SWITCHES = st.fixed_dictionaries({"balance": st.booleans(), "keep_groups": st.booleans()})


def members(schedule: BatchSchedule) -> list[set[int]]:
    return [{position for shard in mini_batch for position in shard} for mini_batch in schedule.mini_batches]


@given(batches(), st.integers(1, 5), st.integers(1, 4), SWITCHES)
def test_every_position_is_in_one_shard_and_one_mini_batch(batch, num_shards, num_mini_batches, switches):
    lengths, group_ids = batch
    schedule = build_batch_schedule(
        lengths, group_ids, num_shards=num_shards, num_mini_batches=num_mini_batches, **switches
    )
    assert len(schedule.shards) == num_shards
    assert sorted(position for shard in schedule.shards for position in shard) == list(range(len(lengths)))
    for shard in range(num_shards):
        assert schedule.shards[shard] == [p for mini_batch in schedule.mini_batches for p in mini_batch[shard]]


@given(batches(), st.integers(1, 5), st.integers(1, 4), SWITCHES)
def test_mini_batches_hold_whole_groups_and_none_is_empty(batch, num_shards, num_mini_batches, switches):
    lengths, group_ids = batch
    schedule = build_batch_schedule(
        lengths, group_ids, num_shards=num_shards, num_mini_batches=num_mini_batches, **switches
    )
    groups = [{group_ids[position] for position in chosen} for chosen in members(schedule)]
    assert len(groups) == min(num_mini_batches, len(set(group_ids)))
    assert sum(len(group) for group in groups) == len(set(group_ids))
    if groups:
        sizes = [len(group) for group in groups]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@given(batches(), st.integers(1, 4))
def test_mini_batch_membership_never_depends_on_balancing_or_layout(batch, num_mini_batches):
    lengths, group_ids = batch
    found = [
        members(
            build_batch_schedule(
                lengths,
                group_ids,
                num_shards=num_shards,
                num_mini_batches=num_mini_batches,
                balance=balance,
                keep_groups=keep_groups,
                cost=cost,
            )
        )
        for num_shards, balance, keep_groups, cost in [
            (1, False, False, Workload()),
            (4, True, False, Workload()),
            (3, True, True, Workload(pair=1.0)),
        ]
    ]
    assert found[0] == found[1] == found[2]


def test_mini_batches_take_groups_in_draw_order_whatever_the_order_of_arrival():
    schedule = build_batch_schedule(
        [1] * 6, [9, 2, 9, 5, 2, 5], num_shards=1, num_mini_batches=3, balance=True, keep_groups=False
    )
    assert members(schedule) == [{1, 4}, {3, 5}, {0, 2}]


@given(batches(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_kept_groups_stay_on_one_shard(batch, num_shards, num_mini_batches, balance):
    lengths, group_ids = batch
    schedule = build_batch_schedule(
        lengths,
        group_ids,
        num_shards=num_shards,
        num_mini_batches=num_mini_batches,
        balance=balance,
        keep_groups=True,
    )
    homes = [{group_ids[position] for position in shard} for shard in schedule.shards]
    assert sum(len(home) for home in homes) == len(set(group_ids))


def test_unbalanced_schedules_deal_in_order():
    schedule = build_batch_schedule(
        [9, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], num_shards=2, num_mini_batches=2, balance=False, keep_groups=False
    )
    assert schedule == BatchSchedule(shards=[[0, 2, 3, 5], [1, 4]], mini_batches=[[[0, 2], [1]], [[3, 5], [4]]])


def test_balanced_shards_are_level_in_each_mini_batch_and_in_the_whole_step():
    # Each mini-batch holds one long sequence: over the step each shard gets one of them.
    lengths = [10, 1, 1, 1] * 4
    schedule = build_batch_schedule(
        lengths, np.repeat(range(4), 4), num_shards=4, num_mini_batches=4, balance=True, keep_groups=False
    )
    assert [sum(lengths[position] for position in shard) for shard in schedule.shards] == [13, 13, 13, 13]


def test_balance_follows_the_cost_not_the_tokens():
    # 4 + 10 pairs-cost for one sequence of 4; 1 + 1 for one token: 14 against seven single tokens.
    schedule = build_batch_schedule(
        [4] + [1] * 7,
        range(8),
        num_shards=2,
        num_mini_batches=1,
        balance=True,
        keep_groups=False,
        cost=Workload(pair=1.0),
    )
    assert sorted(schedule.shards) == [[0], [1, 2, 3, 4, 5, 6, 7]]


def test_a_step_without_sequences_has_empty_shards_and_no_mini_batch():
    schedule = build_batch_schedule([], [], num_shards=2, num_mini_batches=2, balance=True, keep_groups=True)
    assert schedule == BatchSchedule(shards=[[], []], mini_batches=[])


def test_a_rank_owns_consecutive_shards():
    assert rank_shards(4, 2) == [range(2), range(2, 4)]
    assert rank_parts([[0], [3, 1], [2], []], 2) == [[0, 3, 1], [2]]


def test_more_ranks_than_shards_is_our_own_bug():
    with pytest.raises(AssertionError, match="3 ranks"):
        rank_parts([[0], [1]], 3)
