"""What every command that trains tells and writes of its run, and how it ends, however that is."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megappo.cli.restart import restarts_so_far
from megappo.cli.signals import GO_ON, SIGTERM, StopSignals
from megappo.config.record import TrackingConfig
from megappo.config.run import RunConfig
from megappo.controller.stopping import StopRequest
from megappo.errors import INTERRUPTED, MegappoError
from megappo.observability.background_tracker import close_all
from megappo.observability.console import RunConsole
from megappo.observability.logging import get_logger
from megappo.observability.run_directory import RunDirectory, write_summary
from megappo.observability.run_files import RunFiles, tracker_status
from megappo.observability.tracker import WALL_TIME, Line, RunTracker, keep_lines, lines_until
from megappo.observability.tracker_spec import TrackerSpec
from megappo.observability.trackers import make_run_trackers, places_of

logger = get_logger(__name__)


def make_trackers(config: RunConfig, directory: RunDirectory, console: RunConsole) -> list[RunTracker]:
    """Return metrics.jsonl and the configured trackers, each in a thread of its own."""
    spec = TrackerSpec(config=config.tracking, run_name=config.run.name, directory=directory)
    return make_run_trackers(spec, console.note)


class RunRecord(ABC):
    """The part of an observer that does not depend on what is trained."""

    def __init__(self, directory: RunDirectory, *, console: RunConsole, trackers: Sequence[RunTracker]) -> None:
        self._directory = directory
        self._console = console
        self._trackers = trackers
        self._start = time.monotonic()
        self.checkpoint: Path | None = None
        """The newest one."""
        self.last_step = 0

    def expect(self, step: int, checkpoint: Path) -> None:
        """Remember, before anything is started, what the run is to go on from: one that ends before its first step is
        summed up with that."""
        self.last_step, self.checkpoint = step, checkpoint
        if self._directory.holds(checkpoint):
            self._recall(lines_until(self._directory.metrics, last_step=step))

    def on_phase(self, text: str) -> None:
        """Something that takes time begins."""
        self._console.phase(text)

    def on_problem(self, text: str) -> None:
        """Tell of what does not end the run."""
        logger.warning("%s", text)
        self._console.note(text)

    def on_checkpoint(self, folder: Path) -> None:
        """Remember the newest checkpoint."""
        self.checkpoint = folder
        self._console.note(f"saved {folder}")

    @abstractmethod
    def _recall(self, lines: Sequence[Line]) -> None:
        """Keep what the summary needs of these lines of metrics.jsonl, and nothing of any others."""

    def _continue(self, step: int, checkpoint: Path | None) -> list[Line] | None:
        """Go on after a step. Returns the lines of a resumed run up to its checkpoint, those after it being dropped;
        None: the run has a record of its own, as one that begins with another run's checkpoint does."""
        self.last_step = step
        self.checkpoint = checkpoint
        lines: list[Line] | None = None
        if checkpoint is not None and self._directory.holds(checkpoint):
            lines = keep_lines(self._directory.metrics, last_step=step)
            self._recall(lines)
        for tracker in self._trackers:
            tracker.begin()
        return lines

    def _log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Give the numbers of a step to the trackers, with the time."""
        timed = {**numbers, WALL_TIME: time.time()}
        if (restarts := restarts_so_far()) is not None:
            timed["perf/restarts"] = restarts
        for tracker in self._trackers:
            tracker.log(step, timed)

    @property
    def _wall_s(self) -> float:
        return round(time.monotonic() - self._start, 1)

    def _saved(self, num_steps: int, key: str) -> str:
        """What is on disk, in words. `key` is what makes checkpoints."""
        saved = f"checkpoint {self.checkpoint}" if self.checkpoint else f"no checkpoint ({key})"
        return f"metrics of {num_steps} steps in {self._directory.metrics}; {saved}"

    def _close(self, summary: Mapping[str, object], exit_reason: str) -> None:
        """Write summary.json, and close the trackers, which take the files of the run."""
        write_summary(self._directory, summary)
        for path in RunFiles(self._directory).files():
            for tracker in self._trackers:
                tracker.artifact(path)
        close_all(self._trackers, tracker_status(exit_reason))


class Ending(Protocol):
    """What the end of a run needs of its observer."""

    checkpoint: Path | None
    last_step: int

    @property
    def saved(self) -> str: ...

    def finish(self, exit_reason: str) -> dict[str, object]: ...


def run_to_end(
    work: Callable[[], tuple[str, int]],
    *,
    observer: Ending,
    console: RunConsole,
    signals: StopSignals,
    report: Callable[[dict[str, object]], None],
) -> tuple[str, int]:
    """Do the work of a run, and close its record however it ends. Returns how it ended and the exit code.

    Args:
        work: returns the same.
        report: prints the summary.
    """
    exit_reason, code = "failed", 1
    try:
        exit_reason, code = work()
    except KeyboardInterrupt as interrupt:
        exit_reason, code = "interrupted", _ended_early(signals.asked_by_scheduler, observer)
        because = f" ({interrupt})" if str(interrupt) else ""
        console.note(f"interrupted after step {observer.last_step}{because}; {observer.saved}")
    except MegappoError as error:
        exit_reason, code = f"failed: {type(error).__name__}", error.exit_code
        console.note(f"{error}\nended after step {observer.last_step}; {observer.saved}")
    finally:
        report(observer.finish(exit_reason))
    return exit_reason, code


def end_early(stop: StopRequest, observer: Ending, console: RunConsole) -> tuple[str, int]:
    """Tell of a run that was asked to end before its last step. Returns how it ended and the exit code."""
    console.note(f"ended early ({stop.reason}) after step {observer.last_step}; {observer.saved}")
    return "interrupted", _ended_early(stop.reason != SIGTERM, observer)


def _ended_early(can_be_started_again: bool, observer: Ending) -> int:
    """Return the exit code of a run that ended before its last step; see `cli.signals`."""
    return GO_ON if can_be_started_again and observer.checkpoint is not None else INTERRUPTED


def say_where(
    console: RunConsole, directory: RunDirectory, files: Mapping[str, Path], tracking: TrackingConfig
) -> None:
    """Print where to look: files by name, and trackers."""
    places = [f"{name:<15}{path}" for name, path in files.items()]
    places += [f"{name:<15}{command}" for name, command in places_of(tracking, directory).items()]
    console.lines("Look at", places)
