"""Waits by name, and what becomes of those whose time is up."""

import math
import threading
import time
from collections.abc import Iterator

import pytest

from megappo.observability.waiting import Verdict, Wait, ask_when_overdue, open_waits


@pytest.fixture(autouse=True)
def nobody_is_asked() -> Iterator[None]:
    yield
    ask_when_overdue(None)


def make(phase: str, **more: object) -> Wait:
    return Wait(phase=phase, outstanding=lambda: ["actor rank 0"], limit_s=10.0, **more)  # type: ignore[arg-type]


def test_waits_are_open_while_their_body_runs_also_when_it_raises() -> None:
    with make("outer"), make("inner"):
        assert [wait.phase for wait in open_waits()] == ["outer", "inner"]
    with pytest.raises(ValueError, match="seven"), make("failing"):
        raise ValueError("seven")
    assert open_waits() == []


def test_waits_of_all_threads_are_seen_with_their_names() -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait_there() -> None:
        with make("there"):
            entered.set()
            leave.wait(30.0)

    thread = threading.Thread(target=wait_there, name="sample-4")
    thread.start()
    try:
        assert entered.wait(30.0)
        assert [(wait.phase, wait.thread) for wait in open_waits()] == [("there", "sample-4")]
    finally:
        leave.set()
        thread.join()


def test_a_wait_is_quiet_since_its_last_news_and_has_the_rest_of_its_time_left() -> None:
    now = time.monotonic()
    wait = make("x", since=now - 8.0)
    assert 8.0 <= wait.quiet_s < 9.0
    assert 1.0 < wait.left_s <= 2.0
    heard = make("x", since=now - 8.0, news=lambda: now - 3.0)
    assert 3.0 <= heard.quiet_s < 4.0
    late = make("x", since=now - 80.0)
    assert late.left_s == 0.0
    assert Wait(phase="x", outstanding=list, limit_s=None, since=now - 80.0).left_s == math.inf


def test_a_wait_whose_time_is_up_ends_unless_the_one_who_is_asked_lets_it_go_on() -> None:
    wait = make("x", since=time.monotonic() - 80.0, warned=True)
    assert wait.is_given_up() == Verdict()
    assert (wait.left_s, wait.warned) == (0.0, True)
    asked: list[Wait] = []

    def let_go_on(one: Wait) -> Verdict:
        asked.append(one)
        return Verdict(goes_on=True, told="rank 1")

    ask_when_overdue(let_go_on)
    assert wait.is_given_up().told == "rank 1"
    assert asked == [wait]
    assert (wait.left_s > 9.0, wait.warned) == (True, False)
