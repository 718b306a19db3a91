"""What the times of a generation amount to: rate, how full the engines were, and how long its tail was.

Engines tell when a group is done, not when each of its samples was. A sample of l tokens in a group that took from t0
to t1 and whose longest sample has L tokens is taken to run, at an even pace, from t0 to t0 + (t1 - t0) l / L.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FULL = 0.9
"""Share of the slots from which on the engines count as full."""
_FULL_TIME = 0.05
"""Least share of the time in which they must have been full for a rate to be taken from it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupSpan:
    """One group at its engine."""

    start_s: float
    end_s: float
    response_tokens: Sequence[int]
    """Of each sample."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Tail:
    """How full the engines were."""

    makespan_s: float
    """From the first start to the last end."""
    utilisation: float
    """Mean share of the slots that were busy."""
    below_half_share: float
    """Share of the time in which fewer than half of the slots were busy."""
    makespan_over_ideal: float | None
    """Makespan over the time that all tokens take at the rate of full engines; None: they were hardly ever full."""


def measure_tail(spans: Sequence[GroupSpan], slots: int) -> Tail:
    """Return how full `slots` slots were from the first start to the last end of some groups."""
    samples = [sample for span in spans for sample in _samples(span)]
    times = sorted({time for start, end, _ in samples for time in (start, end)})
    begin, end = min(span.start_s for span in spans), max(span.end_s for span in spans)
    busy_s = below_s = full_s = full_tokens = covered_s = 0.0
    for left, right in pairwise(times):
        running = [tokens / (stop - start) for start, stop, tokens in samples if start <= left and stop >= right]
        length, busy = right - left, min(len(running), slots)
        covered_s += length
        busy_s += busy * length
        below_s += length if busy < slots / 2 else 0.0
        if busy >= FULL * slots:
            full_s += length
            full_tokens += sum(running) * length
    makespan_s = end - begin
    total = sum(tokens for _, _, tokens in samples)
    ideal_s = total * full_s / full_tokens if full_s >= _FULL_TIME * makespan_s and full_tokens else None
    return Tail(
        makespan_s=makespan_s,
        utilisation=busy_s / (slots * makespan_s),
        below_half_share=(below_s + makespan_s - covered_s) / makespan_s,
        makespan_over_ideal=None if ideal_s is None else makespan_s / ideal_s,
    )


def _samples(span: GroupSpan) -> list[tuple[float, float, int]]:
    """Return (start, end, tokens) of the samples that have tokens."""
    longest, lasted = max(span.response_tokens), span.end_s - span.start_s
    return [
        (span.start_s, span.start_s + lasted * tokens / longest, tokens) for tokens in span.response_tokens if tokens
    ]
