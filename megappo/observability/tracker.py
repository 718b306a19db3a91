"""Where the numbers of a run go: the ports of trackers, and metrics.jsonl, which every run has."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megappo.errors import MegappoError
from megappo.observability.run_directory import must_be_written, write_atomically

if TYPE_CHECKING:  # it reads what is written here
    from megappo.observability.run_files import RunFiles

WALL_TIME = "timing/unix_s"
"""The metric of every line that says when it was written: trackers take it as the time of its points, so that a point
that is sent twice, or late, is the same point."""

Line = tuple[int, dict[str, float]]
"""A step and its numbers."""


Row = dict[str, str | float | None]
"""One row of a table: column -> what is in it."""


class Tracker(Protocol):
    """Keeps the numbers and files of one run. Any method may raise: it is then made anew, and catches up."""

    def catch_up(self, files: "RunFiles") -> int:
        """Record what the folder of the run holds and the tracker lacks, and nothing twice: always the first call.
        Returns the last step of which a line was there, -1 for none."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step, with their time among them (WALL_TIME); step 0 is before the first."""
        ...

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file, instead of an earlier one of its name."""
        ...

    def table(self, name: str, rows: Sequence[Row]) -> None:
        """Keep a table under a name such as `generations/step_000060`, instead of an earlier one of that name; all rows
        have the same columns."""
        ...

    def close(self, status: str) -> None:
        """End the run: `finished`, `failed` or `interrupted`; always the last call."""
        ...


class RunTracker(Protocol):
    """What a run tells its numbers and files to. Calls return at once; what they raise ends the run."""

    def begin(self) -> None:
        """The folder holds nothing any more but what belongs to this run."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As of a tracker."""
        ...

    def artifact(self, path: Path) -> None:
        """As of a tracker."""
        ...

    def table(self, name: str, rows: Sequence[Row]) -> None:
        """As of a tracker, once the folder has a file of it."""
        ...

    def close(self, status: str) -> None:
        """As of a tracker; `wait` waits for it."""
        ...

    def wait(self, began: float) -> None:
        """Wait until everything is recorded, for a bounded time after `began` (`time.monotonic`)."""
        ...


class JsonlTracker:
    """One JSON object a line: `step` and the metric names as they are. Every line is on disk when `log` returns.

    JSON has no NaN and infinities; they are written as the strings "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Nothing to do: the lines of a run that is resumed are cut before."""

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

    def wait(self, began: float) -> None:
        """Nothing to do, likewise."""


def _to_json(step: int, values: Mapping[str, float]) -> str:
    line = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    return json.dumps({"step": step} | line) + "\n"


def keep_lines(path: Path, *, last_step: int) -> list[Line]:
    """Drop the lines of metrics.jsonl after `last_step` (a run that resumes writes them anew), and a last one that a
    killed process has not finished; returns the others."""
    kept = lines_until(path, last_step=last_step)
    if path.exists():
        write_atomically(path, "".join(_to_json(step, values) for step, values in kept))
    return kept


def lines_until(path: Path, *, last_step: float = math.inf) -> list[Line]:
    """Return the whole lines of metrics.jsonl up to `last_step`; none where there is no such file."""
    return [line for line in _read_lines(path) if line[0] <= last_step] if path.exists() else []


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
