"""Where the numbers of a run go, and how a slow or broken tracker is kept from holding up the run."""

import json
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megappo.errors import MegappoError
from megappo.observability.run_directory import must_be_written, write_atomically

Line = tuple[int, dict[str, float]]
"""A step and its numbers."""


Row = dict[str, str | float | None]
"""One row of a table: column -> what is in it."""


class Tracker(Protocol):
    """Receives the numbers and files of one run. Any method may raise; `close` is called once, last."""

    def continue_run(self, lines: Sequence[Line]) -> None:
        """Before anything is logged: this run goes on after steps that an earlier process has logged. Record those of
        them that were lost with that process."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step; step 0 is before the first."""
        ...

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file."""
        ...

    def table(self, name: str, rows: Sequence[Row]) -> None:
        """Keep a table under a name such as `generations/step_000060`; all rows have the same columns."""
        ...

    def close(self, status: str) -> None:
        """End the run: `finished`, `failed` or `interrupted`."""
        ...


class JsonlTracker:
    """One JSON object a line: `step` and the metric names as they are. Every line is on disk when `log` returns.

    JSON has no NaN and infinities; they are written as the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def continue_run(self, lines: Sequence[Line]) -> None:
        """Nothing to do: they are this file's."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with must_be_written(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(_to_json(step, values))
            file.flush()
            os.fsync(file.fileno())

    def artifact(self, path: Path) -> None:
        """Nothing to do: the file is in the run directory already."""

    def table(self, name: str, rows: Sequence[Row]) -> None:
        """Nothing to do: the run directory has a file of it."""

    def close(self, status: str) -> None:
        """Nothing to do: every line is written."""


def _to_json(step: int, values: Mapping[str, float]) -> str:
    line = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    return json.dumps({"step": step} | line) + "\n"


def keep_lines(path: Path, *, last_step: int) -> list[Line]:
    """Drop the lines of metrics.jsonl after `last_step` (a run that resumes writes them anew), and a last one that a
    killed process has not finished; returns the others."""
    if not path.exists():
        return []
    kept = [line for line in _read_lines(path) if line[0] <= last_step]
    write_atomically(path, "".join(_to_json(step, values) for step, values in kept))
    return kept


def last_line(path: Path) -> int:
    """Return the last step that metrics.jsonl holds a whole line of; -1 where there is none."""
    return max((step for step, _ in _read_lines(path)), default=-1) if path.exists() else -1


def _read_lines(path: Path) -> Iterator[Line]:
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            content = json.loads(text)
            step = int(content.pop("step"))
            values = {name: float(value) for name, value in content.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(texts):
                raise MegappoError(
                    f"{path} line {number} holds no metrics: {text[:40]!r} (remove it, or the file: what it says of "
                    "steps before the checkpoint is for people)"
                ) from error
            return
        yield step, values


_INTERRUPTED_S = 2.0
"""Longest wait in `close` of an interrupted run."""


class BackgroundTracker:
    """Runs another tracker in a thread of its own. Calls return at once; the first failure is said once through
    `warn` and ends the tracking, never the run.

    Args:
        make: makes the tracker, inside the thread (opening a database takes seconds).
        name: for the warning.
        warn: where the one warning goes.
        close_timeout_s: longest wait in `close` for what is still queued.
    """

    def __init__(
        self, make: Callable[[], Tracker], *, name: str, warn: Callable[[str], None], close_timeout_s: float = 30.0
    ) -> None:
        self._name = name
        self._warn = warn
        self._close_timeout_s = close_timeout_s
        self._calls: queue.SimpleQueue[Callable[[Tracker], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def continue_run(self, lines: Sequence[Line]) -> None:
        self._calls.put(lambda tracker: tracker.continue_run(lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._calls.put(lambda tracker: tracker.log(step, kept))

    def artifact(self, path: Path) -> None:
        self._calls.put(lambda tracker: tracker.artifact(path))

    def table(self, name: str, rows: Sequence[Row]) -> None:
        self._calls.put(lambda tracker: tracker.table(name, rows))

    def close(self, status: str) -> None:
        def end(tracker: Tracker) -> None:
            self._closing.set()
            tracker.close(status)

        self._calls.put(end)
        # Someone who pressed Ctrl-C waits for the prompt; metrics.jsonl has every number.
        timeout_s = min(_INTERRUPTED_S, self._close_timeout_s) if status == "interrupted" else self._close_timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"{self._name} did not take the last numbers within {timeout_s:.0f} s")

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while not self._closing.is_set():
                self._calls.get()(tracker)
        # Any failure of somebody else's server or library; this is the boundary behind which it stays.
        except Exception as error:
            self._warn(f"{self._name} failed, the run goes on without it: {type(error).__name__}: {error}")
