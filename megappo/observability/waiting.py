"""What this process waits for right now: every long wait has a name, and what a watchdog needs to tell of it.

    with Wait(phase="update", limit_s=1800.0, key="cluster.call_timeout_s", outstanding=names_of_pending) as wait:
        ...

A wait is open while its body runs, so only the waiting itself stands there. What is outstanding is asked for when
somebody wants to know; entering and leaving costs about a microsecond.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """What is to become of a wait whose time is up."""

    goes_on: bool = False
    """Whether it is to wait as long again."""
    told: str = ""
    """Who is probably to blame and where the report is, to be added to an error; empty: nothing is known."""


def _no_news() -> float:
    return -math.inf


@dataclass(kw_only=True, slots=True, eq=False)
class Wait:
    """A wait under way. Use as a context manager."""

    phase: str
    outstanding: Callable[[], Sequence[str]]
    """Names what has not come yet; asked from any thread."""
    limit_s: float | None
    """It is given up after so long without news; None: it consists of waits that have limits of their own."""
    key: str = ""
    """Configuration key of the limit; empty: it follows from several."""
    news: Callable[[], float] = _no_news
    """When, by `time.monotonic`, something last came that shows that it is not in vain; asked from any thread."""
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)
    warned: bool = False
    """Whether a report told of it."""

    def __enter__(self) -> "Wait":
        _open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.discard(self)

    @property
    def quiet_s(self) -> float:
        """Seconds since it began, or since the last news."""
        return time.monotonic() - max(self.since, self.news())

    @property
    def left_s(self) -> float:
        """Seconds until its time is up, at least 0; infinite without a limit."""
        return math.inf if self.limit_s is None else max(0.0, self.limit_s - self.quiet_s)

    def begin_again(self) -> None:
        """Count from now on."""
        self.since, self.warned = time.monotonic(), False

    def is_given_up(self) -> Verdict:
        """Say what is to become of it now that its time is up; if it goes on, its time counts from now on."""
        verdict = _judge(self)
        if verdict.goes_on:
            self.begin_again()
        return verdict


Judge = Callable[[Wait], Verdict]

_open: set[Wait] = set()


def _end(wait: Wait) -> Verdict:
    return Verdict()


_judge: Judge = _end


def open_waits() -> list[Wait]:
    """Return the waits of all threads, the oldest first. Safe from any thread."""
    return sorted(_open, key=lambda wait: wait.since)


def ask_when_overdue(judge: Judge | None) -> None:
    """Name who decides about waits whose time is up, in the thread that waits; None: they are given up."""
    global _judge
    _judge = judge or _end
