"""Parts of equal cost under a cap of tokens: two loads per part, searched together.

Shapes: B sequences, P parts, C slots of a part.

Invariants (asserted by tests/balance/test_capped.py):
1. What is returned covers every position once, in exactly `num_parts` parts of at most `max_tokens` tokens each.
2. Nothing is returned (None) only when the search ends above the cap.

Equal cost alone overfills the parts that hold short sequences, since long ones cost more per token. So the search
starts from equal cost and swaps or moves sequences between a part above a limit (tokens: the cap; cost: a little above
the mean) and one with room, always the exchange that lowers the sum of the squared excess of the pair most. When no
exchange helps, the limit of the cost is raised, never the cap.
"""

from collections.abc import Sequence

import numpy as np

from megappo.balance.partition import SPARE_SLOTS, partition, slot_table, table_parts

COST_LIMITS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, np.inf)
"""Tolerated excess of a part's cost over the mean (or over the longest sequence), tried one after the other."""
MAX_ROUNDS = 16
"""Bound of the search under one limit: what can be reached is reached in a few rounds."""
PATIENCE = 4
"""Rounds without any gain (each pairs the parts differently) after which the limit is raised."""


def level_under_cap(tokens: np.ndarray, costs: np.ndarray, num_parts: int, max_tokens: int) -> list[list[int]] | None:
    """Split positions 0..B-1 into parts of nearly equal cost and at most `max_tokens` tokens each; None: not found.

    Args:
        tokens: [B] int64, each at most `max_tokens`.
        costs: [B] float64.
    """
    parts = partition(costs, num_parts, equal_counts=False)
    search = _Search(tokens, costs, parts, max_tokens)
    if search.fits():
        return parts
    mean, longest = float(costs.sum()) / num_parts, float(costs.max())
    for cost_limit in sorted({max(mean * (1 + excess), longest) for excess in COST_LIMITS}):
        if search.run(cost_limit=cost_limit):
            return table_parts(search.slots, len(tokens))
    return None


class _Search:
    """The state of one search: the slot table [P, C] and the loads of its parts."""

    def __init__(self, tokens: np.ndarray, costs: np.ndarray, parts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self.slots = slot_table(parts, spare=SPARE_SLOTS, count=len(tokens))
        # Loads of a sequence and of a free slot, relative so that an excess of either kind weighs the same.
        self._tokens = np.append(tokens, 0.0) / max_tokens
        self._costs = np.append(costs, 0.0)
        self._whole_tokens = np.append(tokens, 0)
        self._max_tokens = max_tokens

    def fits(self) -> bool:
        """Return whether every part is within the cap (in whole tokens, without rounding)."""
        return bool((self._whole_tokens[self.slots].sum(axis=1) <= self._max_tokens).all())

    def run(self, *, cost_limit: float) -> bool:
        """Search until every part is within the cap and `cost_limit`; return whether it got there."""
        costs = self._costs / cost_limit
        loads = np.stack([self._tokens[self.slots].sum(axis=1), costs[self.slots].sum(axis=1)])  # [2, P]
        idle = 0
        for _ in range(MAX_ROUNDS):
            excess = _excess(loads)
            num_over = int((excess > 0).sum())
            if num_over == 0:
                return self.fits()
            if idle > PATIENCE:
                return False
            heavy = np.argsort(-excess, kind="stable")[: min(num_over, len(excess) // 2)]
            others = np.setdiff1d(np.arange(len(excess)), heavy)
            others = others[np.argsort(loads[:, others].max(axis=0), kind="stable")]
            # A round without gain is followed by one with other partners.
            light = np.roll(others, -idle * len(heavy))[: len(heavy)]
            idle = 0 if self._exchange(loads, costs, heavy, light) else idle + 1
        return False

    def _exchange(self, loads: np.ndarray, costs: np.ndarray, heavy: np.ndarray, light: np.ndarray) -> bool:
        """Make the best exchange of every pair of parts, updating `loads`; return whether there was one."""
        give, take = self.slots[heavy], self.slots[light]  # [pairs, C]
        moved = np.stack([load[give][:, :, None] - load[take][:, None, :] for load in (self._tokens, costs)])
        after = _excess(loads[:, heavy, None, None] - moved) + _excess(loads[:, light, None, None] + moved)
        flat = after.reshape(len(heavy), -1)
        best = flat.argmin(axis=1)
        before = _excess(loads[:, heavy]) + _excess(loads[:, light])
        better = np.flatnonzero(flat[np.arange(len(heavy)), best] < before * (1 - 1e-6))
        if not len(better):
            return False
        from_slot, to_slot = np.divmod(best[better], give.shape[1])
        self.slots[heavy[better], from_slot] = take[better, to_slot]
        self.slots[light[better], to_slot] = give[better, from_slot]
        loads[:, heavy[better]] -= moved[:, better, from_slot, to_slot]
        loads[:, light[better]] += moved[:, better, from_slot, to_slot]
        return True


def _excess(loads: np.ndarray) -> np.ndarray:
    """Return the sum of the squared excess over 1 of both loads, [2, ...] -> [...]. Rounding is no excess."""
    over = np.maximum(loads - (1 + 1e-9), 0)
    return (over * over).sum(axis=0)
