"""Which sequence is computed where and when: mini-batches and shards.

Positions are indices into the lengths given. A shard is the unit that a data-parallel rank owns: with S shards and R
ranks (R divides S) rank r owns shards r * S / R to (r + 1) * S / R - 1, so that groups of workers with different
data-parallel sizes work on the same shards.

Invariants (asserted by tests/balance/test_schedule.py):
1. Every position is in exactly one shard and one mini-batch; `shards[s]` is `mini_batches[m][s]` for m = 0, 1, ...
2. A mini-batch holds whole groups; which groups depends on the group ids only, never on lengths, order of arrival,
   the number of shards or balancing. Numbers of groups of two mini-batches differ by at most one; none is empty.
3. With `keep_groups` all sequences of a group are in one shard.
4. The same input gives the same schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megappo.balance.partition import partition
from megappo.balance.workload import TOKENS, Workload


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchSchedule:
    """Who computes what in one step.

    Example: two groups of two samples on two shards, one mini-batch per group
        BatchSchedule(shards=[[0, 2], [1, 3]], mini_batches=[[[0], [1]], [[2], [3]]])
    """

    shards: list[list[int]]
    """[shard] -> positions, mini-batch after mini-batch."""
    mini_batches: list[list[list[int]]]
    """[mini-batch][shard] -> positions, ascending."""


def build_batch_schedule(
    lengths: Sequence[int] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    *,
    num_shards: int,
    num_mini_batches: int,
    balance: bool,
    keep_groups: bool,
    cost: Workload = TOKENS,
) -> BatchSchedule:
    """Assign sequences to mini-batches and shards.

    Args:
        lengths: tokens of each sequence, prompt included, [B].
        group_ids: draw of each sequence, [B]; ids grow with the draw.
        num_mini_batches: optimizer steps per epoch; fewer when there are fewer groups.
        balance: spread each mini-batch over the shards by cost (else deal it in order of group and position).
        keep_groups: keep the samples of a group on one shard.
    """
    costs = cost.costs(lengths)
    groups = _groups_in_draw_order(np.asarray(group_ids, dtype=np.int64))
    mini_batches: list[list[list[int]]] = []
    totals = np.zeros(num_shards)
    for members in _cut(groups, min(num_mini_batches, len(groups))):
        units = members if keep_groups else [[position] for group in members for position in group]
        if balance:
            parts = _balanced(units, costs, totals)
        else:
            parts = [units[shard::num_shards] for shard in range(num_shards)]
        shards = [sorted(position for unit in part for position in unit) for part in parts]
        totals += [costs[shard].sum() for shard in shards]
        mini_batches.append(shards)
    joined = [[position for shards in mini_batches for position in shards[shard]] for shard in range(num_shards)]
    return BatchSchedule(shards=joined, mini_batches=mini_batches)


def rank_shards(num_shards: int, num_ranks: int) -> list[range]:
    """Return the shards of each data-parallel rank; `num_ranks` must divide `num_shards`."""
    assert num_shards % num_ranks == 0, f"{num_ranks} ranks do not divide {num_shards} shards"
    per_rank = num_shards // num_ranks
    return [range(rank * per_rank, (rank + 1) * per_rank) for rank in range(num_ranks)]


def rank_parts(shards: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Join the shards of each data-parallel rank: [rank] -> positions, shard after shard."""
    return [
        [position for shard in owned for position in shards[shard]] for owned in rank_shards(len(shards), num_ranks)
    ]


def _groups_in_draw_order(group_ids: np.ndarray) -> list[list[int]]:
    """Return the positions of each group, groups by ascending id."""
    order = np.argsort(group_ids, kind="stable")
    starts = np.flatnonzero(np.diff(group_ids[order])) + 1
    return [group.tolist() for group in np.split(order, starts) if len(group)]


def _cut(groups: list[list[int]], num_mini_batches: int) -> list[list[list[int]]]:
    """Cut the groups into consecutive runs whose sizes differ by at most one, larger ones first."""
    if not groups:
        return []
    bounds = [-(-len(groups) * index // num_mini_batches) for index in range(num_mini_batches + 1)]
    return [groups[start:end] for start, end in pairwise(bounds)]


def _balanced(units: list[list[int]], costs: np.ndarray, totals: np.ndarray) -> list[list[list[int]]]:
    """Partition units by cost; the heaviest part goes to the shard with the least cost so far (`totals`, [S]), so
    that the shards are balanced over the step too, not only within each mini-batch."""
    unit_costs = _costs_of(units, costs)
    parts = partition(unit_costs, len(totals), equal_counts=False)
    heaviest_first = sorted(range(len(parts)), key=lambda part: -float(unit_costs[parts[part]].sum()))
    lightest_first = sorted(range(len(parts)), key=lambda shard: float(totals[shard]))
    assigned: list[list[list[int]]] = [[] for _ in parts]
    for part, shard in zip(heaviest_first, lightest_first):
        assigned[shard] = [units[unit] for unit in parts[part]]
    return assigned


def _costs_of(units: list[list[int]], costs: np.ndarray) -> np.ndarray:
    """Return the cost of each unit, [U] float64; at once where each is a single sequence, as most steps have it."""
    if all(len(unit) == 1 for unit in units):
        return costs[[unit[0] for unit in units]]
    return np.array([costs[unit].sum() for unit in units])
