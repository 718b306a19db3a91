"""Phases: what is under way, who hears of it, and what a recorder keeps."""

import threading

import pytest

from megappo.observability.phases import (
    Phase,
    add_listener,
    in_phase,
    phase,
    phases_under_way,
    remove_listener,
)
from megappo.observability.spans import Span, SpanRecorder, busy_share
from megappo.observability.timing import PhaseTimer


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def began(self, phase: Phase) -> None:
        self.lines.append(f"+{phase.name}")

    def ended(self, phase: Phase, end_ns: int) -> None:
        assert end_ns >= phase.start_ns
        self.lines.append(f"-{phase.name}")


def names() -> list[str]:
    return [found.name for found in phases_under_way()]


def test_phases_nest_and_end_also_when_the_body_raises() -> None:
    with pytest.raises(ValueError), phase("update", mini_batch=2) as outer, phase("forward"):
        assert names() == ["update", "forward"]
        assert outer.details == {"mini_batch": 2} and outer.thread == threading.current_thread().name
        raise ValueError
    assert names() == []


def test_threads_are_seen_from_each_other() -> None:
    inside, leave = threading.Event(), threading.Event()

    @in_phase("elsewhere")
    def work() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=work, name="other")
    thread.start()
    inside.wait()
    (found,) = phases_under_way()
    assert (found.name, found.thread) == ("elsewhere", "other")
    leave.set()
    thread.join()
    assert names() == []


def test_listeners_hear_of_the_end_of_what_began_before_they_came() -> None:
    heard = Heard()
    with phase("a"):
        add_listener(heard)
        with phase("b"):
            pass
    remove_listener(heard)
    with phase("c"):
        pass
    assert heard.lines == ["+b", "-b", "-a"]


def test_a_recorder_keeps_what_ends_and_cuts_off_what_is_under_way() -> None:
    with phase("before"):
        recorder = SpanRecorder()
    with phase("under way", step=3) as under_way:
        with phase("inside"):
            pass
        spans = recorder.stop(under_way.start_ns + 5)
    with phase("after"):
        pass
    assert [span.name for span in spans] == ["before", "inside", "under way"]
    assert (spans[2].end_ns, spans[2].details) == (under_way.start_ns + 5, {"step": 3})
    assert recorder.stop(0) == spans[:2], "nothing is recorded any more"


def test_the_phases_of_a_timer_are_phases() -> None:
    timer = PhaseTimer()
    with timer.phase("generate"):
        assert names() == ["generate"]
    assert names() == []


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([(0, 10)], 1.0),
        ([(-5, 2), (8, 20)], 0.4),
        ([(1, 4), (2, 3), (3, 6)], 0.5),
        ([(20, 30)], 0.0),
        ([(2, 4), (2, 4), (4, 5)], 0.3),
    ],
)
def test_the_busy_share_counts_every_moment_once(spans: list[tuple[int, int]], share: float) -> None:
    assert busy_share([Span("x", "t", *span) for span in spans], 0, 10) == pytest.approx(share)
