"""A tracker in a thread of its own: it may be slow, and it may be away, and the run notices neither.

Nothing is lost while it is away, since everything that it is told is in the folder of the run before: once the tracker
answers again, it catches up from there. What it lacks when the process ends, a run that is resumed or
`megappo track RUN` sends.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import Row, RunTracker, Tracker

_FIRST_WAIT_S, _LONGEST_WAIT_S = 2.0, 60.0
"""Waits between attempts to reach a tracker; each is twice the one before."""
_LAST_ATTEMPTS_S = 1.0
"""The same once the run has ended."""
_INTERRUPTED_S = 2.0
"""Longest wait for trackers at the end of an interrupted run."""


class _Call:
    """One thing to tell."""

    def __init__(self, tell: Callable[[Tracker], None], step: int | None = None) -> None:
        self.tell = tell
        self.step = step
        """Of the line of metrics that it tells of."""


class BackgroundTracker:
    """Runs a tracker in a thread. Calls return at once and never raise.

    Args:
        make: opens the tracker, inside the thread; also again, after it failed.
        files: the folder of the run.
        name: for messages.
        say: where messages go: once that the tracker is away, once that it is back.
        close_timeout_s: longest wait for it at the end; for a run that was interrupted 2 s at most, since somebody
            waits for the prompt.
        first_wait_s: before the second attempt to reach it.
    """

    def __init__(
        self,
        make: Callable[[], Tracker],
        *,
        files: RunFiles,
        name: str,
        say: Callable[[str], None],
        close_timeout_s: float = 30.0,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        self._make = make
        self._files = files
        self._name = name
        self._say = say
        self._close_timeout_s = close_timeout_s
        self._first_wait_s = first_wait_s
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        """None: it is the end."""
        self._begun, self._closing = threading.Event(), threading.Event()
        self._status = ""
        self._heard_end, self._done, self._away = False, False, False
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Send what the folder holds; from now on that are lines of this run."""
        self._begun.set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._tell(_Call(lambda tracker: tracker.log(step, kept), step))

    def artifact(self, path: Path) -> None:
        self._tell(_Call(lambda tracker: tracker.artifact(path)))

    def table(self, name: str, rows: Sequence[Row]) -> None:
        self._tell(_Call(lambda tracker: tracker.table(name, rows)))

    def close(self, status: str) -> None:
        self._status = status
        self._tell(None)
        self._closing.set()

    def wait(self, began: float) -> None:
        bound_s = min(_INTERRUPTED_S, self._close_timeout_s) if self._status == "interrupted" else self._close_timeout_s
        self._thread.join(max(0.0, began + bound_s - time.monotonic()))
        if not self._done:
            self._say(
                f"{self._name} does not have everything of this run; `megappo track {self._files.directory.path}` "
                "sends it what it lacks"
            )

    def _tell(self, call: _Call | None) -> None:
        self._calls.put(call)
        self._begun.set()

    def _work(self) -> None:
        wait_s = self._first_wait_s
        while not self._done:
            try:
                self._serve()
                return
            # Any failure of somebody else's server or library; this is the boundary behind which it stays.
            except Exception as error:
                wait_s = min(2.0 * wait_s, _LONGEST_WAIT_S) if self._away else self._first_wait_s
                self._tell_of(error)
            self._forget_calls()
            if not self._closing.wait(wait_s):
                continue
            time.sleep(_LAST_ATTEMPTS_S)

    def _serve(self) -> None:
        """Open the tracker, bring it up to date, and tell it what comes, until the end."""
        tracker = self._make()
        # A run that is resumed cuts its record before it tells anything.
        self._begun.wait()
        self._forget_calls()
        told = tracker.catch_up(self._files)
        if self._away:
            self._away = False
            self._say(f"{self._name} answers again, and has everything of this run so far")
        while not self._heard_end:
            call = self._calls.get()
            if call is None:
                self._heard_end = True
            elif call.step is None or call.step > told:
                call.tell(tracker)
        tracker.close(self._status)
        self._done = True

    def _forget_calls(self) -> None:
        """Drop what waits to be told: the folder has it."""
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            self._heard_end = self._heard_end or call is None

    def _tell_of(self, error: Exception) -> None:
        if not self._away:
            self._away = True
            reason = str(error).partition("\n")[0]
            self._say(
                f"{self._name} failed, the run goes on without it and sends it later what it misses: "
                f"{type(error).__name__}: {reason}"
            )


def close_all(trackers: Sequence[RunTracker], status: str) -> None:
    """End the record of a run in all trackers at the same time."""
    began = time.monotonic()
    for tracker in trackers:
        tracker.close(status)
    for tracker in trackers:
        tracker.wait(began)
