"""Parts of equal cost under a cap of tokens: two loads per part, searched together.

Shapes: B sequences, P parts.

Invariants (asserted by tests/balance/test_capped.py):
1. What is returned covers every position once, in exactly `num_parts` parts of at most `max_tokens` tokens each;
   positions within a part ascend.
2. Whatever number of parts `pack` needs is enough: the search never fails.
3. The same input gives the same parts.

Long sequences cost more per token, so parts of equal cost hold unequal numbers of tokens, and near the fewest possible
parts there is no room for that: equal cost then asks for the same mix of long and short sequences in every part. The
search starts from equal cost and exchanges one sequence for up to two between pairs of parts (one for two shorter ones
is what changes the mix at nearly constant tokens), lowering the squared distance from the mean cost plus a weight times
the squared tokens above the cap. The weight rises from turn to turn, so early exchanges shape the cost and late ones
the fit. If that ends above the cap, the search starts again from the packing with a weight that lets nothing over it.
"""

from itertools import chain, pairwise

import numpy as np

from megappo.balance.partition import longest_first

TURNS = 16
"""Turns of the search; in as many more it only sees to what is still above the cap."""
WEIGHTS = np.append(np.logspace(0, 5, TURNS), np.full(TURNS, 1e7))
"""Weight of tokens above the cap (in units of the cap) against cost (in units of the mean), turn after turn."""
HARD = np.full(TURNS, 1e15)
"""Weights under which no exchange gains that takes a part over the cap."""
REACH = 3
"""Parts that a part looks at in one turn: more find little more and take longer."""
TOLERANCE = 2e-3
"""The search ends when all parts are this close to the mean cost, relative."""


def level_under_cap(tokens: np.ndarray, costs: np.ndarray, packed: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Split positions 0..B-1 into as many parts as `packed` has, nearly equal in cost.

    Args:
        tokens: [B] int64.
        costs: [B] float64, growing with the tokens.
        packed: any split into parts of at most `max_tokens` tokens each; parts may be empty.
    """
    if len(packed) < 2 or not costs.any():
        return packed
    owners = _search(tokens, costs, longest_first(costs, len(packed), equal_counts=False), max_tokens, WEIGHTS)
    if np.bincount(owners, weights=tokens).max() > max_tokens:
        owners = _search(tokens, costs, packed, max_tokens, HARD)
    ends = np.cumsum(np.bincount(owners, minlength=len(packed))).tolist()
    by_part = np.argsort(owners, kind="stable").tolist()
    return [by_part[start:end] for start, end in pairwise([0, *ends])]


def _search(
    tokens: np.ndarray, costs: np.ndarray, parts: list[list[int]], max_tokens: int, weights: np.ndarray
) -> np.ndarray:
    """Search from the given parts; returns the part of each position, [B] int64."""
    # Imported here: a second of compilation that a process without a plan to make need not pay.
    from megappo.balance.exchange import Limits, search

    owners = np.empty(len(tokens), dtype=np.int64)
    owners[list(chain.from_iterable(parts))] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    relative = costs / (costs.sum() / len(parts))
    order = np.argsort(-costs, kind="stable")
    limits = Limits(cap=float(max_tokens), tolerance=TOLERANCE, enough=TURNS, reach=REACH)
    search(owners, tokens.astype(np.float64), relative, order, len(parts), weights / max_tokens**2, limits)
    return owners
