"""Numbers on a mask: compaction of packed tokens, sums per sequence, moments that merge, whitening.

Shapes: N packed tokens, M tokens on the mask, B sequences. Everything computes on the M compacted tokens, so nothing
off the mask is ever read and outputs are exactly 0 there. A shard is worked through in runs of sequences that fit the
cache of a processor, so the float64 copies are never larger than a run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megappo.batch.requests import Whitening

WHITENING_EPSILON = 1e-8
"""Added to the variance before the square root."""
RUN_TOKENS = 1 << 16
"""Packed tokens of a run (a longer sequence is a run of its own)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MaskedTokens:
    """The tokens on a mask, in batch order."""

    index: np.ndarray
    """[M] int64: their positions among the N packed tokens."""
    offsets: np.ndarray
    """[B+1] int64: their offsets per sequence."""
    num_tokens: int
    """N."""

    @property
    def sequence(self) -> np.ndarray:
        """Row of the sequence that each belongs to, [M] int64."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens on the mask per sequence, [B] int64."""
        return np.diff(self.offsets)

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return the values [N] at the M tokens, float64."""
        # The index is in bounds; `clip` saves a check of each entry.
        return values.take(self.index, mode="clip").astype(np.float64, copy=False)

    def scatter(self, values: np.ndarray, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Return [N] with the values [M] on the mask and 0 elsewhere."""
        out = np.zeros(self.num_tokens, dtype=dtype)
        out[self.index] = values
        return out

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum the values [M] per sequence, [B] float64; an empty sequence sums to 0. A sum depends on the values of
        its sequence alone, bit by bit."""
        sums = np.zeros(len(self.offsets) - 1)
        occupied = self.lengths > 0
        if occupied.any():
            starts: np.ndarray = self.offsets[:-1][occupied]
            sums[occupied] = np.add.reduceat(values, starts, dtype=np.float64)
        return sums

    def means(self, values: np.ndarray) -> np.ndarray:
        """Mean of the values [M] per sequence, [B] float64; NaN for an empty sequence."""
        lengths = self.lengths
        return np.where(lengths > 0, self.sums(values) / np.maximum(lengths, 1), np.nan)


def compact(mask: np.ndarray, offsets: np.ndarray) -> MaskedTokens:
    """Return the tokens of a packed mask [N] bool with the given offsets [B+1]."""
    index = np.flatnonzero(mask)
    return MaskedTokens(index=index, offsets=np.searchsorted(index, offsets), num_tokens=len(mask))


def count_tokens(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the tokens on a packed mask [N] bool per sequence, [B] int64."""
    # A vectorised count per sequence: much faster than numpy's segmented sums of booleans.
    counts = [np.count_nonzero(mask[start:end]) for start, end in pairwise(offsets.tolist())]
    return np.array(counts, dtype=np.int64)


def sequence_runs(offsets: np.ndarray, most: int = RUN_TOKENS) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of runs of whole sequences of at most `most` tokens, or of one longer sequence; one empty
    run when there are no sequences.

    Args:
        offsets: [B+1] int64.
    """
    first, num_sequences = 0, len(offsets) - 1
    while first < num_sequences:
        fitting = np.searchsorted(offsets, int(offsets[first]) + most, side="right")
        last = max(int(fitting) - 1, first + 1)
        yield first, last
        first = last
    if not num_sequences:
        yield 0, 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers; they merge without loss of precision
    (Chan et al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Two-pass moments of float64 values."""
        if values.size == 0:
            return cls()
        center = float(values.mean())
        return cls(count=float(values.size), mean=center, m2=float(np.square(values - center).sum()))

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both samples together."""
        if self.count == 0 or other.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * other.count / count,
            m2=self.m2 + other.m2 + delta * delta * self.count * other.count / count,
        )

    @property
    def variance(self) -> float | None:
        """Unbiased variance; None below two numbers."""
        return self.m2 / (self.count - 1) if self.count >= 2 else None

    @property
    def whitening(self) -> Whitening | None:
        """(x - mean) / sqrt(variance + 1e-8); None (x stays as it is) below two numbers."""
        variance = self.variance
        if variance is None:
            return None
        return Whitening(mean=self.mean, inverse_std=float((variance + WHITENING_EPSILON) ** -0.5))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of all samples together."""
    merged = Moments()
    for part in parts:
        merged = merged.merge(part)
    return merged


def whiten(values: np.ndarray, whitening: Whitening | None) -> np.ndarray:
    """Apply a whitening to values of any shape; None returns them unchanged."""
    return values if whitening is None else (values - whitening.mean) * whitening.inverse_std
