"""When a run ends before its last step on purpose: somebody asks it to, or its time is up."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StopRequest:
    """Asks the loop to save and end at its next safe point. Set by a signal handler, read by the loop."""

    reason: str | None = None
    """Why, for people; None: nobody asked."""

    def ask(self, reason: str) -> None:
        """Ask, unless that was done before."""
        self.reason = self.reason or reason


class TimeLimit:
    """Tells when a run must save and end so that both are done within its time.

    Formula: time so far + longest step so far + longest save so far > limit, where a step counts from one safe point
    to the next (validation included), and a save that nobody has seen yet counts as long as a step.
    """

    def __init__(self, limit_s: float | None, *, now: Callable[[], float] = time.monotonic) -> None:
        """The time begins now; without a limit it is never up."""
        self._limit_s = limit_s
        self._now = now
        self._start = self._step_began = now()
        self._longest_step_s = 0.0
        self._longest_save_s: float | None = None

    def begin_steps(self) -> None:
        """What came before was the start of the run, and no step."""
        self._step_began = self._now()

    def end_step(self) -> None:
        """Note that a step has come to its safe point."""
        now = self._now()
        self._longest_step_s = max(self._longest_step_s, now - self._step_began)
        self._step_began = now

    def note_save(self, seconds: float) -> None:
        """Note how long a save took, until it was whole."""
        self._longest_save_s = max(self._longest_save_s or 0.0, seconds)

    @property
    def is_up(self) -> bool:
        """Whether another step and its save would not be done in time."""
        if self._limit_s is None:
            return False
        save_s = self._longest_step_s if self._longest_save_s is None else self._longest_save_s
        return self._now() - self._start + self._longest_step_s + save_s > self._limit_s
