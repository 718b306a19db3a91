"""Spans of all processes as one file for chrome://tracing and https://ui.perfetto.dev (Trace Event Format).

A lane of such a file takes spans that nest or follow each other. Spans of a thread that overlap otherwise (requests of
one event loop) get lanes beside each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.observability.clocks import Offset
from megappo.observability.spans import Span


@dataclass(kw_only=True, slots=True, frozen=True)
class ProcessSpans:
    """What one process did."""

    name: str
    spans: Sequence[Span]
    offset: Offset
    """Of its clock to the driver's."""

    def on_driver_clock(self) -> list[Span]:
        """Return the spans in the driver's time."""
        ahead = self.offset.ahead_ns
        return [span._replace(start_ns=span.start_ns - ahead, end_ns=span.end_ns - ahead) for span in self.spans]


def lanes_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Deal the spans of a thread out to as few lanes as this order gives, so that on each of them any two spans nest or
    do not overlap."""
    lanes: list[list[Span]] = []
    open_ends: list[list[int]] = []
    # The longer first where two begin together: it is around the other.
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        number = next((number for number, ends in enumerate(open_ends) if _fits(span, ends)), len(lanes))
        if number == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[number].append(span)
        open_ends[number].append(span.end_ns)
    return lanes


def _fits(span: Span, open_ends: list[int]) -> bool:
    """Whether a span fits on a lane; `open_ends` are those of the spans there, and lose what has ended by then."""
    while open_ends and open_ends[-1] <= span.start_ns:
        open_ends.pop()
    return not open_ends or span.end_ns <= open_ends[-1]


def make_chrome_trace(  # Any: JSON
    processes: Sequence[ProcessSpans], *, title: str, start_ns: int, end_ns: int
) -> dict[str, Any]:
    """Return the content of a trace: what of the spans lies between two times of the driver, which is time 0 of it.

    The error of each clock is in `otherData`.
    """
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes):
        events += _process_events(number, process, start_ns, end_ns)
    errors = {f"clock error of {process.name}": f"{process.offset.error_ns / 1e6:.3f} ms" for process in processes}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title} | errors}


def _process_events(number: int, process: ProcessSpans, start_ns: int, end_ns: int) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", number, 0, name=process.name)
    yield _meta("process_sort_index", number, 0, sort_index=number)
    threads: dict[str, list[Span]] = {}
    for span in process.on_driver_clock():
        cut = span._replace(start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
        if cut.end_ns > cut.start_ns:
            threads.setdefault(span.thread, []).append(cut)
    lane_number = 0
    for thread, spans in sorted(threads.items()):
        for index, lane in enumerate(lanes_of(spans)):
            yield _meta("thread_name", number, lane_number, name=thread if index == 0 else f"{thread} ({index + 1})")
            yield _meta("thread_sort_index", number, lane_number, sort_index=lane_number)
            for span in lane:
                yield {
                    "ph": "X",
                    "name": span.name,
                    "cat": "phase",
                    "pid": number,
                    "tid": lane_number,
                    "ts": (span.start_ns - start_ns) / 1000,
                    "dur": (span.end_ns - span.start_ns) / 1000,
                    "args": dict(span.details),
                }
            lane_number += 1


def _meta(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
