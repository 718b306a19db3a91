"""Partition of sequences over ranks by cost.

Shapes: B sequences, P parts, R rows of a slot table, C candidate columns of a swap round.

Invariants (asserted by tests/balance/test_partition.py):
1. Every position is in exactly one part; positions within a part ascend; there are exactly `num_parts` parts.
2. With `equal_counts` the sizes of two parts differ by at most one.
3. Without it the heaviest part costs at most what dealing the sequences longest first would give, so at most 4/3 of
   the best possible (Graham 1969).
4. The result depends on the costs only; equal input gives equal output.

Many sequences per part, equal counts: largest differencing (Karmarkar and Karp 1982) on rows. Sequences sorted by cost
are cut into rows of P; a row gives one sequence to each part. Two rows are merged by adding the costs of one to those
of the other in reverse, which is differencing on P-tuples with one sort per merge.
Few sequences per part, or free counts: longest first to the lightest part with room (Graham 1969). A row scheme is
worse there, since a part with a very long sequence needs several of the shortest ones.
Then a bounded search swaps sequences between heavy and light parts, all pairs of parts at once.
"""

import heapq
from collections.abc import Sequence

import numpy as np

FEW_ROWS = 24
"""Sequences per part up to which longest first starts from the better parts than row differencing (measured on
lognormal lengths: equal at 24 to 32)."""
MAX_ROUNDS = 128
"""Bound of the swap search."""
MAX_CANDIDATES = 24
"""Sequences of a part looked at in one round."""
PATIENCE = 8
"""Rounds without any gain (each pairs the parts differently) after which the search ends."""
SPARE_SLOTS = 2
"""Free slots of the fullest part when counts are free: a swap with a free slot moves a sequence."""
TOLERANCE = 1e-5
"""The search ends when the heaviest part is this close to the mean, relative."""


def partition(costs: Sequence[float] | np.ndarray, num_parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Split positions 0..B-1 into `num_parts` parts of nearly equal cost.

    Args:
        costs: cost of each sequence, >= 0.
        equal_counts: sizes may differ by at most one (else they are free, which balances better).
    """
    weights = np.asarray(costs, dtype=np.float64)
    if equal_counts and len(weights) > FEW_ROWS * num_parts:
        slots = _difference_rows(weights, num_parts)
    else:
        parts = longest_first(weights, num_parts, equal_counts=equal_counts)
        slots = slot_table(parts, spare=0 if equal_counts else SPARE_SLOTS, count=len(weights))
    return table_parts(_swap_search(weights, slots, equal_counts=equal_counts), len(weights))


def imbalance(part_costs: Sequence[float] | np.ndarray) -> float:
    """Return max / mean - 1 over all parts, empty ones included; 0 when there is no cost at all."""
    totals = np.asarray(part_costs, dtype=np.float64)
    if not totals.any():
        return 0.0
    return float(totals.max() / totals.mean() - 1)


def _difference_rows(weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Return a slot table [P, R] of positions; free slots (at most one per part) hold the position B."""
    count = len(weights)
    num_rows = -(-count // num_parts)
    order = np.full(num_rows * num_parts, count, dtype=np.int64)
    order[:count] = np.argsort(-weights, kind="stable")
    rows = order.reshape(num_rows, num_parts)
    sums = list(np.append(weights, 0.0)[rows])
    spreads = [(-(row[0] - row[-1]), index) for index, row in enumerate(sums)]
    heapq.heapify(spreads)
    merges: list[tuple[int, int, np.ndarray]] = []
    while len(spreads) > 1:
        _, first = heapq.heappop(spreads)
        second = spreads[0][1]
        merged = sums[first] + sums[second][::-1]
        descending = np.argsort(-merged, kind="stable")
        sums[second] = merged[descending]
        merges.append((first, second, descending))
        heapq.heapreplace(spreads, (-(sums[second][0] - sums[second][-1]), second))
    return np.take_along_axis(rows, _columns_of_parts(merges, spreads, num_rows, num_parts), axis=1).T.copy()


def _columns_of_parts(
    merges: list[tuple[int, int, np.ndarray]], root: list[tuple[float, int]], num_rows: int, num_parts: int
) -> np.ndarray:
    """Undo the merges from the last to the first; return for each row the column that belongs to each part, [R, P]."""
    columns = np.empty((num_rows, num_parts), dtype=np.int64)
    if root:
        columns[root[0][1]] = np.arange(num_parts)
    for first, second, descending in reversed(merges):
        before = descending[columns[second]]
        columns[second] = num_parts - 1 - before
        columns[first] = before
    return columns


def longest_first(weights: np.ndarray, num_parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Deal the sequences by falling cost, each to the part with the least cost so far (and with room for it)."""
    small, num_large = divmod(len(weights), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    lightest = [(0.0, part) for part in range(num_parts)]
    costs = weights.tolist()
    for position in np.argsort(-weights, kind="stable").tolist():
        if equal_counts:
            # Only num_large parts may hold one sequence more than the others.
            while len(parts[lightest[0][1]]) >= small + (num_large > 0):
                heapq.heappop(lightest)
        total, part = lightest[0]
        parts[part].append(position)
        heapq.heapreplace(lightest, (total + costs[position], part))
        num_large -= len(parts[part]) > small
    return parts


def slot_table(parts: Sequence[Sequence[int]], *, spare: int, count: int) -> np.ndarray:
    """Return the parts as rows of equal length, filled up with free slots (position `count`) in front, `spare` of
    them in the fullest."""
    width = max((len(part) for part in parts), default=0) + spare
    slots = np.full((len(parts), width), count, dtype=np.int64)
    for row, part in zip(slots, parts):
        row[width - len(part) :] = part
    return slots


def table_parts(slots: np.ndarray, count: int) -> list[list[int]]:
    """Return the table as lists of positions, ascending, without the free slots."""
    ordered = np.sort(slots, axis=1)
    sizes = (ordered < count).sum(axis=1)
    return [row[:size] for row, size in zip(ordered.tolist(), sizes.tolist())]


def _swap_search(weights: np.ndarray, slots: np.ndarray, *, equal_counts: bool) -> np.ndarray:
    """Swap between heavy and light parts, in place: every round pairs each part above the mean with one of the lighter
    half and makes the one swap that leaves the smallest gap in that pair. Return the table."""
    padded = np.append(weights, 0.0)
    num_parts, width = slots.shape
    half = num_parts // 2
    if half == 0 or width == 0:
        return slots
    totals = padded[slots].sum(axis=1)
    mean = totals.mean()
    floor = max(mean * (1 + TOLERANCE), weights.max(initial=0.0))
    idle = 0
    for turn in range(MAX_ROUNDS):
        if idle > PATIENCE or totals.max() <= floor:
            break
        order = np.argsort(-totals, kind="stable")
        num_pairs = min(half, int((totals > mean).sum()))
        # A round without gain is followed by one with other partners.
        light = np.roll(order[num_parts - half :][::-1], -idle * num_pairs)[:num_pairs]
        columns = _candidates(width, turn)
        gained = _swap_once(padded, slots, totals, (order[:num_pairs], light), columns, equal_counts=equal_counts)
        idle = 0 if gained else idle + 1
    return slots


def _candidates(width: int, turn: int) -> np.ndarray:
    """Return the columns looked at in this round: all of a narrow table, else evenly spaced ones, others each round,
    and the first, where the free slots are."""
    step = -(-width // MAX_CANDIDATES)
    return np.union1d(np.arange(turn % step, width, step), [0])


def _swap_once(
    padded: np.ndarray,
    slots: np.ndarray,
    totals: np.ndarray,
    pairs: tuple[np.ndarray, np.ndarray],
    columns: np.ndarray,
    *,
    equal_counts: bool,
) -> bool:
    """Make the best swap of every pair (heavy, light) of parts that narrows its gap; return whether there was one."""
    heavy, light = pairs
    free = len(padded) - 1
    give, take = slots[np.ix_(heavy, columns)], slots[np.ix_(light, columns)]
    shift = padded[give][:, :, None] - padded[take][:, None, :]  # [pairs, C, C]
    gap = totals[heavy] - totals[light]
    left = np.abs(gap[:, None, None] - 2 * shift)
    if equal_counts:
        # A part that is one short already must not give a second sequence for a free slot.
        short = (slots[heavy] == free).any(axis=1)
        left[np.broadcast_to((short[:, None] & (take == free))[:, None, :], left.shape)] = np.inf
    flat = left.reshape(len(heavy), -1)
    best = flat.argmin(axis=1)
    better = np.flatnonzero(flat[np.arange(len(heavy)), best] < gap * (1 - 1e-9))
    if not len(better):
        return False
    from_column, to_column = np.divmod(best[better], len(columns))
    heavy, light = heavy[better], light[better]
    moved = shift[better, from_column, to_column]
    slots[heavy, columns[from_column]] = take[better, to_column]
    slots[light, columns[to_column]] = give[better, from_column]
    totals[heavy] -= moved
    totals[light] += moved
    return True
