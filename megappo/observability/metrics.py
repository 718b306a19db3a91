"""Metrics that merge exactly: over micro-batches, ranks and mini-batches, in any order.

A statistic keeps what is needed to merge (a mean keeps its total and its count), so no number depends on how the
batch was cut. A mean of nothing is absent, never 0 or NaN.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """How two values of one metric merge."""

    mean = "mean"
    sum = "sum"
    max = "max"
    min = "min"


@dataclass(slots=True, frozen=True)
class Stat:
    """One mergeable statistic. `total` is the sum for mean and sum, the extreme for max and min;
    `count` is the denominator of a mean (and 0 means absent)."""

    kind: Kind
    total: float
    count: float = 1.0

    def merge(self, other: "Stat") -> "Stat":
        """Return the statistic of both samples together. Raises ValueError when the kinds differ."""
        if self.kind is not other.kind:
            raise ValueError(f"cannot merge {self.kind} with {other.kind}")
        if self.count == 0 or other.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        if self.kind in (Kind.mean, Kind.sum):
            return Stat(self.kind, self.total + other.total, count)
        if math.isnan(self.total) or math.isnan(other.total):
            return Stat(self.kind, math.nan, count)
        extreme = max if self.kind is Kind.max else min
        return Stat(self.kind, extreme(self.total, other.total), count)

    @property
    def value(self) -> float | None:
        """The number, or None when nothing was counted."""
        if self.count == 0:
            return None
        return self.total / self.count if self.kind is Kind.mean else self.total


Metrics = dict[str, Stat]
"""Metric name (`area/thing/stat`) to statistic."""


def mean(total: float, count: float) -> Stat:
    """Mean of `count` numbers that sum to `total`."""
    return Stat(Kind.mean, float(total), float(count))


def total(value: float) -> Stat:
    """A sum over all parts."""
    return Stat(Kind.sum, float(value))


def maximum(value: float, count: float = 1.0) -> Stat:
    """Largest value; `count` 0 says that there was none."""
    return Stat(Kind.max, float(value), float(count))


def minimum(value: float, count: float = 1.0) -> Stat:
    """Smallest value; `count` 0 says that there was none."""
    return Stat(Kind.min, float(value), float(count))


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Merge metrics of several parts; a name absent in one part is absent there only."""
    merged: Metrics = {}
    for part in parts:
        for name, stat in part.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    return merged


def values(metrics: Metrics) -> dict[str, float]:
    """Return the numbers; absent ones are left out."""
    return {name: stat.value for name, stat in metrics.items() if stat.value is not None}


Packed = dict[str, list[str | float]]
"""Metrics as JSON holds them: name -> kind, total, count."""


def pack(metrics: Metrics) -> Packed:
    """Return metrics for a JSON file; `unpack` returns them bitwise."""
    return {name: [stat.kind.value, stat.total, stat.count] for name, stat in metrics.items()}


def unpack(packed: Mapping[str, Sequence[Any]]) -> Metrics:  # Any: as in Packed; NaN and infinities may be their names
    """Return what `pack` was given. Raises ValueError or TypeError when it is something else."""
    return {name: Stat(Kind(kind), float(total), float(count)) for name, (kind, total, count) in packed.items()}
