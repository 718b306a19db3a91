"""What a process did in a stretch of time, phase by phase, and how busy that made it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megappo.observability.phases import Detail, Phase, add_listener, phases_under_way, remove_listener

_MOST_SPANS = 100_000
"""Of one process: some 20 MB. A step has thousands of them at most; what comes after is left out."""


class Span(NamedTuple):
    """A phase that has ended, or was cut off. Times are those of `time.monotonic_ns` on its machine."""

    name: str
    thread: str
    start_ns: int
    end_ns: int
    details: Mapping[str, Detail] = {}


class SpanRecorder:
    """Keeps the phases that end while it records, those included that began before (port `PhaseListener`)."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        add_listener(self)

    def began(self, phase: Phase) -> None:
        """Nothing to do: a phase is kept when it ends."""

    def ended(self, phase: Phase, end_ns: int) -> None:
        """Keep a phase."""
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(_span(phase, end_ns))

    def stop(self, now_ns: int) -> list[Span]:
        """Record nothing any more. Returns the phases, those under way as if they ended now."""
        remove_listener(self)
        return [*self._spans, *(_span(phase, now_ns) for phase in phases_under_way())]


def _span(phase: Phase, end_ns: int) -> Span:
    return Span(phase.name, phase.thread, phase.start_ns, end_ns, dict(phase.details))


def busy_share(spans: Sequence[Span], start_ns: int, end_ns: int) -> float:
    """Return the part of a stretch of time in which any of the spans was under way, 0 to 1."""
    busy = until = 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        begin, end = max(span.start_ns, start_ns, until), min(span.end_ns, end_ns)
        if end > begin:
            busy, until = busy + end - begin, end
    return busy / (end_ns - start_ns)
