"""Statistics of the samples of one prompt.

Shapes: B sequences, G groups. Invariants (asserted by tests/algo/test_groups.py):
1. Every sum runs over the group's terms in the order of their values, so results are bitwise the same for any order
   of the sequences and any sharding.
2. A group whose values are all equal has deviations of exactly 0.
3. A spread within rounding error is none: a group has signal exactly where its standard deviation is not 0.
"""

import numpy as np

ROUNDING = 1e-6
"""Scores that differ by less than this share of the largest of them are equal: 0.1 + 0.2 is 0.3."""


class GroupedValues:
    """Values [B] float64 with group ids [B], and statistics per group.

    Sums are taken above the group's smallest value, which makes deviations of equal values exactly 0 and keeps
    precision when values share a large offset.
    """

    def __init__(self, values: np.ndarray, group_ids: np.ndarray, tie_break: np.ndarray | None = None) -> None:
        """`tie_break` [B] orders equal values, where a sum has terms that depend on more than the value."""
        _, self.index = np.unique(group_ids, return_inverse=True)
        self.sizes = np.bincount(self.index)
        """[G] int64."""
        keys = (values, self.index) if tie_break is None else (tie_break, values, self.index)
        self._order = np.lexsort(keys)
        ends = np.cumsum(self.sizes)
        in_order = values[self._order]
        self.minimum = in_order[ends - self.sizes]
        """[G]."""
        self.maximum = in_order[ends - 1]
        """[G]."""
        self.second_largest = np.where(self.sizes > 1, in_order[ends - 2], self.maximum)
        """[G]; the only value in a group of one."""
        self._above = values - self.spread(self.minimum)
        self._values = values

    def spread(self, per_group: np.ndarray) -> np.ndarray:
        """Return a number per group [G] at each of its sequences [B]."""
        return per_group[self.index]

    def sum(self, terms: np.ndarray) -> np.ndarray:
        """Sum terms [B] per group [G]."""
        return np.bincount(self.index[self._order], weights=terms[self._order], minlength=len(self.sizes))

    def mean(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Mean of the values per group [G], weighted by `weights` [B] (each group's sum must be positive)."""
        if weights is None:
            return self.minimum + self.sum(self._above) / self.sizes
        return self.minimum + self.sum(self._above * weights) / self.sum(weights)

    def deviations(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Value minus (weighted) mean of the group, [B]."""
        above = self._above if weights is None else self._above * weights
        size = self.sizes if weights is None else self.sum(weights)
        return self._above - self.spread(self.sum(above) / size)

    def standard_deviations(self) -> np.ndarray:
        """Unbiased standard deviation per group [G] (denominator: size - 1); 0 for a group of one and for a spread
        within rounding error, std <= 1e-6 max|value|."""
        squares = self.sum(np.square(self.deviations()))
        deviation = np.sqrt(squares / np.maximum(self.sizes - 1, 1))
        return np.where(deviation <= self._rounding, 0.0, deviation)

    def have_signal(self) -> np.ndarray:
        """Whether the values of a group differ by more than rounding error, [G] bool; a value that is not finite counts
        as a difference, so that it is reported and not dropped."""
        return self.standard_deviations() != 0

    def best_leads(self) -> np.ndarray:
        """Whether the largest value leads the second by more than rounding error, [G] bool, likewise."""
        return ~(self.maximum - self.second_largest <= self._rounding)

    @property
    def _rounding(self) -> np.ndarray:
        """Largest difference that counts as none, [G]."""
        return ROUNDING * np.maximum(np.abs(self.minimum), np.abs(self.maximum))
