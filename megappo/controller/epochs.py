"""The batches of supervised training: epochs in shuffled order, cut by rows or by tokens.

Invariants (asserted by tests/controller/test_epochs.py):
1. Every epoch holds each row exactly once, in an order that depends on the seed and the epoch only.
2. No batch is larger than the limit, except a single row that is: it makes a batch alone.
3. An epoch has as few batches as its order admits, and of these cuts one whose largest batch (of several rows) is
   smallest, so that no small rest is left at its end.
4. The batch of a step depends on the arguments only: a run that is resumed needs nothing but the number of its step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megappo.data.sampler import check_same, epoch_order
from megappo.errors import DataError


@dataclass(kw_only=True)
class EpochBatches:
    """Which rows each step trains on.

    Example:
        batches = EpochBatches(
            lengths=np.array([5, 3, 4]), fingerprint="1f", batch_size=2, batch_tokens=None, seed=0, shuffle=True
        )
        batches.rows_of(1)  # the rows of the first step, ascending
    """

    lengths: np.ndarray
    """[rows] int64, tokens of each row."""
    fingerprint: str
    """Digest of the rows, in order."""
    batch_size: int
    """Most rows of a batch, where batch_tokens is None."""
    batch_tokens: int | None
    """Most tokens of a batch."""
    seed: int
    shuffle: bool
    _cuts: dict[int, list[np.ndarray]] = field(default_factory=dict[int, list[np.ndarray]], init=False)
    """Batches of the epoch that was asked for last."""
    _ends: list[int] = field(default_factory=list[int], init=False)
    """Steps up to the end of each epoch so far."""

    def __post_init__(self) -> None:
        """Raises DataError when there is no row, or fewer than one batch takes."""
        needed = self.batch_size if self.batch_tokens is None else 1
        if len(self.lengths) < needed:
            raise DataError(
                f"{len(self.lengths)} rows are fewer than one batch of {needed} "
                "(give more rows, or a smaller batch_size)"
            )

    def rows_of(self, step: int) -> np.ndarray:
        """Return the rows of a step (the first one is 1), ascending, int64."""
        epoch = self._epoch_of(step)
        before = self._ends[epoch - 1] if epoch else 0
        return np.sort(self._batches(epoch)[step - before - 1])

    def steps_of(self, epochs: int) -> int:
        """Return the steps of so many epochs."""
        while len(self._ends) < epochs:
            self._add_epoch()
        return self._ends[epochs - 1]

    def epochs_after(self, step: int) -> float:
        """Return the passes over the rows that are finished after a step, with the part of the running one."""
        if step == 0:
            return 0.0
        epoch = self._epoch_of(step)
        before = self._ends[epoch - 1] if epoch else 0
        done = sum(len(batch) for batch in self._batches(epoch)[: step - before])
        return epoch + done / len(self.lengths)

    def state(self) -> dict[str, Any]:  # Any: plain numbers and strings, for a JSON file
        """Return what the batches depend on."""
        return {
            "rows": len(self.lengths),
            "fingerprint": self.fingerprint,
            "batch_size": self.batch_size,
            "batch_tokens": self.batch_tokens,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def check(self, state: Mapping[str, Any]) -> None:  # Any: as in `state`
        """Raise DataError when `state` is of other batches: a step's number would not be a place in these."""
        own = self.state()
        check_same(state, own, own, same="data, seed and batches")

    def _epoch_of(self, step: int) -> int:
        while not self._ends or self._ends[-1] < step:
            self._add_epoch()
        return int(np.searchsorted(self._ends, step))

    def _add_epoch(self) -> None:
        steps = len(self._batches(len(self._ends)))
        self._ends.append(steps + (self._ends[-1] if self._ends else 0))

    def _batches(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._cuts:
            order = epoch_order(len(self.lengths), epoch, seed=self.seed, shuffle=self.shuffle)
            self._cuts = {epoch: np.split(order, level_cuts(self._sizes[order], self._limit)[1:-1])}
        return self._cuts[epoch]

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.ones_like(self.lengths) if self.batch_tokens is None else self.lengths

    @property
    def _limit(self) -> int:
        return self.batch_tokens or self.batch_size


def level_cuts(sizes: np.ndarray, limit: int) -> list[int]:
    """Return the bounds of consecutive batches under a limit: as few as possible, and the largest of several rows as
    small as that number admits.

    Args:
        sizes: [rows] int64, positive.
    """
    fewest = greedy_cuts(sizes, limit)
    smallest, largest = 1, limit
    while smallest < largest:
        middle = (smallest + largest) // 2
        if len(greedy_cuts(sizes, middle)) <= len(fewest):
            largest = middle
        else:
            smallest = middle + 1
    return greedy_cuts(sizes, largest)


def greedy_cuts(sizes: np.ndarray, limit: int) -> list[int]:
    """Return the bounds of consecutive batches, each as large as the limit admits; a larger row is alone. Their number
    never grows with the limit."""
    ends = np.cumsum(sizes)
    bounds = [0]
    while bounds[-1] < len(sizes):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        bounds.append(max(start + 1, int(np.searchsorted(ends, before + limit, side="right"))))
    return bounds
