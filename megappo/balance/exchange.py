"""The exchange search of `megappo.balance.capped`, compiled by numba: its loops are too short for numpy.

Shapes: B sequences, P parts, W slots of a part.

Importing this takes about a second (it compiles, or reads what was compiled before), so `capped` imports it when a
search is due. Nothing here may be reordered by the compiler: every machine must find the same plan.
"""

from typing import NamedTuple

import numpy as np

from megappo.compilation import compile_loop

CANDIDATES = 32
"""Slots of a part that are tried in one turn: all of a usual part, else evenly spaced ones, others each turn."""
LEAST_GAIN = 1e-7
"""An exchange must lower the badness of its two parts by this, in squares of the mean cost."""


class Table(NamedTuple):
    """State of a search: a row lists the sequences of a part by falling cost, then at least one free slot."""

    positions: np.ndarray
    """[P, W] int64; a free slot holds -1."""
    tokens: np.ndarray
    """[P, W] float64, whole numbers; 0 in a free slot."""
    costs: np.ndarray
    """[P, W] float64 in units of the mean part; 0 in a free slot."""
    sizes: np.ndarray
    """[P] int64."""
    token_loads: np.ndarray
    """[P] float64, whole numbers."""
    cost_loads: np.ndarray
    """[P] float64."""


class Limits(NamedTuple):
    """What ends a search."""

    cap: float
    """Tokens of a part."""
    tolerance: float
    """Parts this close to the mean cost, relative, are level."""
    enough: int
    """Turns after which it is enough that every part is under the cap."""
    reach: int
    """Parts that a part looks at in one turn."""


@compile_loop
def _put(table: Table, part: int, position: int, tokens: float, cost: float) -> None:
    """Put a sequence into its place in a row; position -1: nothing to put."""
    if position < 0:
        return
    slot = table.sizes[part]
    while slot > 0 and table.costs[part, slot - 1] < cost:
        table.positions[part, slot] = table.positions[part, slot - 1]
        table.tokens[part, slot] = table.tokens[part, slot - 1]
        table.costs[part, slot] = table.costs[part, slot - 1]
        slot -= 1
    table.positions[part, slot] = position
    table.tokens[part, slot] = tokens
    table.costs[part, slot] = cost
    table.sizes[part] += 1
    table.token_loads[part] += tokens
    table.cost_loads[part] += cost


@compile_loop
def _take(table: Table, part: int, slot: int) -> tuple[int, float, float]:
    """Take the sequence of a slot out of its row; return position, tokens and cost (-1, 0, 0 of a free slot)."""
    taken = table.positions[part, slot], table.tokens[part, slot], table.costs[part, slot]
    if taken[0] < 0:
        return taken
    size = table.sizes[part]
    for index in range(slot, size):  # the slot after the last sequence is free
        table.positions[part, index] = table.positions[part, index + 1]
        table.tokens[part, index] = table.tokens[part, index + 1]
        table.costs[part, index] = table.costs[part, index + 1]
    table.sizes[part] = size - 1
    table.token_loads[part] -= taken[1]
    table.cost_loads[part] -= taken[2]
    return taken


@compile_loop
def _fill(owners: np.ndarray, tokens: np.ndarray, costs: np.ndarray, order: np.ndarray, num_parts: int) -> Table:
    """Return the table of the given parts, with as many free slots as the largest has sequences and eight more."""
    shape = (num_parts, 2 * np.bincount(owners, minlength=num_parts).max() + 8)
    table = Table(
        np.full(shape, -1, np.int64),
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(num_parts, np.int64),
        np.zeros(num_parts),
        np.zeros(num_parts),
    )
    for position in order:
        _put(table, owners[position], position, tokens[position], costs[position])
    return table


@compile_loop
def _best(table: Table, one: int, two: int, cap: float, weight: float, turn: int, limit: float):
    """Return the best exchange of one sequence of part `one` for two of part `two`: (change, slot, slot, slot).

    Any of the three slots may be free, so this covers swaps of one for one and plain moves. Badness of a part is
    (cost - mean)^2 + weight * (tokens above the cap)^2; the change of its sum over both parts must be below `limit`.
    """
    best = (limit, -1, -1, -1)
    size_one, size_two, width = table.sizes[one], table.sizes[two], table.costs.shape[1]
    if size_one + 2 >= width or size_two + 1 >= width:
        return best
    room_one, room_two = cap - table.token_loads[one], cap - table.token_loads[two]
    gap = table.cost_loads[one] - table.cost_loads[two]
    over = weight * (min(room_one, 0.0) ** 2 + min(room_two, 0.0) ** 2)
    costs, tokens = table.costs[two], table.tokens[two]
    step_one, step_two = 1 + size_one // CANDIDATES, 1 + size_two // CANDIDATES
    first_two = turn % step_two
    last_two = size_two - (size_two - first_two) % step_two
    for given in range(turn % step_one, size_one + 1, step_one):
        # Moving cost m changes the badness by 2 m (m - gap) - over or more: below the best only near gap / 2.
        square = gap * gap / 4 + (over + best[0]) / 2
        if square <= 0:
            break
        cost, radius = table.costs[one, given], np.sqrt(square)
        low, high = cost - gap / 2 - radius, cost - gap / 2 + radius
        if high <= 0:
            break
        start = last_two
        for first in range(first_two, size_two + 1, step_two):
            if 2 * costs[first] < low:
                break
            # Rows fall in cost: what is too cheap beside this one is too cheap beside the next.
            while start > first and costs[first] + costs[start] <= low:
                start -= step_two
            stop = first if first < size_two else first - 1
            second = start + step_two
            while second - step_two > stop:  # a range with a step is several times slower here
                second -= step_two
                back = costs[first] + costs[second]
                if back >= high:
                    break
                change = 2 * (cost - back) * (cost - back - gap) - over
                if change >= best[0]:
                    continue
                moved = table.tokens[one, given] - tokens[first] - tokens[second]
                change += weight * (min(room_one + moved, 0.0) ** 2 + min(room_two - moved, 0.0) ** 2)
                if change < best[0]:
                    best = (change, given, first, second)
    return best


@compile_loop
def _improve(table: Table, part: int, cap: float, weight: float, turn: int, reach: int) -> bool:
    """Make the best exchange of a part with `reach` others, different ones each turn; return whether there was one."""
    num_parts = len(table.sizes)
    best, one, two = (-LEAST_GAIN, -1, -1, -1), -1, -1
    for step in range(min(reach, num_parts - 1)):
        other = (part + 1 + (turn * reach + step) % (num_parts - 1)) % num_parts
        found = _best(table, part, other, cap, weight, turn, best[0])
        if found[1] >= 0:
            best, one, two = found, part, other
        found = _best(table, other, part, cap, weight, turn, best[0])
        if found[1] >= 0:
            best, one, two = found, other, part
    if one < 0:
        return False
    given = _take(table, one, best[1])
    second = _take(table, two, best[3])  # the later slot first: the earlier one keeps its place
    first = _take(table, two, best[2])
    _put(table, one, first[0], first[1], first[2])
    _put(table, one, second[0], second[1], second[2])
    _put(table, two, given[0], given[1], given[2])
    return True


@compile_loop
def search(
    owners: np.ndarray,
    tokens: np.ndarray,
    costs: np.ndarray,
    order: np.ndarray,
    num_parts: int,
    weights: np.ndarray,
    limits: Limits,
) -> None:
    """Exchange sequences until every part is under the cap and level, or nothing gains, or the turns are over.

    Args:
        owners: [B] int64, part of each position; written.
        costs: [B] float64 in units of the mean part.
        order: [B] int64, positions by falling cost.
        weights: of tokens above the cap, one per turn (a turn: every part once).
    """
    cap = limits.cap
    table = _fill(owners, tokens, costs, order, num_parts)
    unmoved = 0
    for turn in range(len(weights)):
        under = table.token_loads.max() <= cap
        level = np.abs(table.cost_loads - 1.0).max() <= limits.tolerance
        if under and (level or turn >= limits.enough or unmoved >= num_parts - 1):
            break
        moved = False
        for part in range(num_parts):
            moved |= _improve(table, part, cap, weights[turn], turn, limits.reach)
        unmoved = 0 if moved else unmoved + limits.reach
    for part in range(num_parts):
        owners[table.positions[part, : table.sizes[part]]] = part
