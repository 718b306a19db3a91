"""Numbers on a mask: compaction of packed tokens, sums per sequence, moments that merge, whitening.

Shapes: N packed tokens, M tokens on the mask, B sequences. Everything computes on the M compacted tokens, so nothing
off the mask is ever read and outputs are exactly 0 there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megappo.batch.requests import Whitening

WHITENING_EPSILON = 1e-8
"""Added to the variance before the square root."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MaskedTokens:
    """The tokens on a mask, in batch order."""

    index: np.ndarray
    """[M] int64: their positions among the N packed tokens."""
    offsets: np.ndarray
    """[B+1] int64: their offsets per sequence."""
    sequence: np.ndarray
    """[M] int64: row of the sequence that each belongs to."""
    num_tokens: int
    """N."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens on the mask per sequence, [B] int64."""
        return np.diff(self.offsets)

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Return the values [N] at the M tokens, float64."""
        return values[self.index].astype(np.float64)

    def scatter(self, values: np.ndarray, dtype: type[np.generic] = np.float32) -> np.ndarray:
        """Return [N] with the values [M] on the mask and 0 elsewhere."""
        out = np.zeros(self.num_tokens, dtype=dtype)
        out[self.index] = values
        return out

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum the values [M] per sequence, [B] float64, in token order; an empty sequence sums to 0."""
        return np.bincount(self.sequence, weights=values, minlength=len(self.offsets) - 1)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Mean of the values [M] per sequence, [B] float64; NaN for an empty sequence."""
        lengths = self.lengths
        return np.where(lengths > 0, self.sums(values) / np.maximum(lengths, 1), np.nan)


def compact(mask: np.ndarray, offsets: np.ndarray) -> MaskedTokens:
    """Return the tokens of a packed mask [N] bool with the given offsets [B+1]."""
    index = np.flatnonzero(mask)
    compact_offsets = np.searchsorted(index, offsets)
    sequence = np.repeat(np.arange(len(offsets) - 1), np.diff(compact_offsets))
    return MaskedTokens(index=index, offsets=compact_offsets, sequence=sequence, num_tokens=len(mask))


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
