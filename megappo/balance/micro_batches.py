"""Micro-batches under a hard cap of tokens.

Invariants (asserted by tests/balance/test_micro_batches.py):
1. Every position is in exactly one micro-batch; within one, positions keep the order of their part.
2. No micro-batch holds more than the cap, except a single sequence that is longer than the cap: it runs alone.
3. `pack` never makes two micro-batches that would fit into one.
4. Every rank gets the same number of micro-batches: at least `min_micro_batches`, a multiple of `multiple_of`; some
   may be empty.
5. The same input gives the same plan.

A number of micro-batches from tokens divided by the cap is only a lower bound: five sequences of 5 tokens under a cap
of 8 need five, not ceil(25 / 8) = 4. So the number comes from the packing itself; the work is then levelled over that
number.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from megappo.balance.capped import level_under_cap
from megappo.balance.workload import TOKENS, Workload

ROOM = 0.01
"""Share of micro-batches that a plan may have above the bound even where fewer would do: with every micro-batch filled
to the cap their work cannot be level."""


def plan_micro_batches(
    parts: Sequence[Sequence[int]],
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    min_micro_batches: int = 1,
    multiple_of: int = 1,
    cost: Workload = TOKENS,
) -> list[list[list[int]]]:
    """Cut each rank's positions into micro-batches, the same number on every rank, nearly equal in cost.

    Args:
        parts: positions of each rank.
        max_tokens: hard cap of a micro-batch.
        multiple_of: the number of micro-batches is rounded up to a multiple of this (interleaved pipelines).

    Returns:
        [rank][micro-batch] -> positions. Where a rank has too few sequences the rest is explicit empty micro-batches:
        it still runs every collective.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    positions = [np.asarray(part, dtype=np.int64) for part in parts]
    alone = [part[tokens[part] > max_tokens] for part in positions]
    shared = [part[tokens[part] <= max_tokens] for part in positions]
    packed = [pack(tokens[part], max_tokens) for part in shared]
    fitting = [len(long) + len(filled) for long, filled in zip(alone, packed)]
    with_room = [int(micro_batch_bound(tokens[part], max_tokens) * (1 + ROOM)) for part in positions]
    needed = max([min_micro_batches, *fitting, *with_room])
    count = -(-needed // multiple_of) * multiple_of
    plan: list[list[list[int]]] = []
    for long, part, filled in zip(alone, shared, packed):
        filled.extend([] for _ in range(count - len(long) - len(filled)))
        level = level_under_cap(tokens[part], cost.costs(tokens[part]), filled, max_tokens)
        found = part.tolist()
        plan.append([[position] for position in long.tolist()] + [[found[at] for at in chosen] for chosen in level])
    return plan


def micro_batch_bound(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> int:
    """Return a number of micro-batches below which no plan can go."""
    tokens = np.asarray(lengths, dtype=np.int64)
    alone = tokens > max_tokens
    return int(alone.sum()) + max(-(-int(tokens[~alone].sum()) // max_tokens), int((~alone).any()))


def pack(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[list[int]]:
    """Pack positions 0..B-1 into few micro-batches: best fit decreasing (Johnson et al. 1974), at most 11/9 of the
    fewest possible plus one, and close to the bound when sequences are short against the cap."""
    tokens = np.asarray(lengths, dtype=np.int64)
    sizes = tokens.tolist()
    packed: list[list[int]] = []
    room: list[int] = []  # ascending (negative: a sequence over the cap), beside it the micro-batch that has this room
    owner: list[int] = []
    for position in np.argsort(-tokens, kind="stable").tolist():
        size = sizes[position]
        found = bisect_left(room, size)
        if found == len(room):
            target, left = len(packed), max_tokens - size
            packed.append([])
        else:
            target, left = owner.pop(found), room.pop(found) - size
        packed[target].append(position)
        slot = bisect_left(room, left)
        room.insert(slot, left)
        owner.insert(slot, target)
    return [sorted(positions) for positions in packed]
