"""A tracker that is slow, hangs, or is away at the start, in the middle or at the end: the run notices nothing, and the
tracker has everything in the end."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megappo.observability.background_tracker import BackgroundTracker, close_all
from megappo.observability.run_directory import RunDirectory
from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import JsonlTracker, Row, RunTracker

WAIT_S = 60.0
"""For a thread that has a millisecond of work, on a machine that does much else."""


class Server:
    """Where numbers go, which may be away."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.tables: list[str] = []
        self.files: list[str] = []
        self.statuses: list[str] = []
        self.away = False
        self.refusals = 0
        self.answers = threading.Event()
        """Set: it does not hang."""
        self.answers.set()

    def require(self) -> None:
        self.answers.wait()
        if self.away:
            self.refusals += 1
            raise ConnectionError("connection refused\nby the peer")

    def open(self) -> "Link":
        self.require()
        return Link(self)


class Link:
    """A tracker of it."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def catch_up(self, files: RunFiles) -> int:
        self._server.require()
        lines = files.lines()
        known = {step for step, _ in self._server.points}
        self._server.points += [(step, values["a"]) for step, values in lines if step not in known]
        return lines[-1][0] if lines else -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._server.require()
        self._server.points.append((step, values["a"]))

    def artifact(self, path: Path) -> None:
        self._server.require()
        self._server.files.append(path.name)

    def table(self, name: str, rows: Sequence[Row]) -> None:
        self._server.require()
        self._server.tables.append(name)

    def close(self, status: str) -> None:
        self._server.require()
        self._server.statuses.append(status)


class Tracked:
    """A run with one tracker."""

    def __init__(self, directory: RunDirectory, *, close_timeout_s: float = WAIT_S) -> None:
        self.server = Server()
        self.said: list[str] = []
        self.lines = JsonlTracker(directory.metrics)
        self.directory = directory
        self._close_timeout_s = close_timeout_s

    def open(self) -> BackgroundTracker:
        self.tracker = BackgroundTracker(
            self.server.open,
            files=RunFiles(self.directory),
            name="MLflow",
            say=self.said.append,
            close_timeout_s=self._close_timeout_s,
            first_wait_s=0.001,
        )
        return self.tracker

    def log(self, step: int) -> None:
        trackers: list[RunTracker] = [self.lines, self.tracker]
        for tracker in trackers:
            tracker.log(step, {"a": step / 2})

    def close(self, status: str = "finished") -> None:
        close_all([self.lines, self.tracker], status)

    def wait_for(self, steps: int) -> None:
        """Wait until the server has as many points."""
        until(lambda: len(self.server.points) >= steps)


def until(condition: object) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def run(tmp_path: Path) -> Tracked:
    return Tracked(RunDirectory(path=tmp_path))


def test_a_run_that_ends_well_has_told_everything_in_order(run: Tracked) -> None:
    run.open().begin()
    for step in range(3):
        run.log(step)
    run.tracker.table("generations/step_000002", [])
    run.tracker.artifact(Path("config.yaml"))
    run.close()
    server = run.server
    assert server.points == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert (server.tables, server.files, server.statuses) == (
        ["generations/step_000002"],
        ["config.yaml"],
        ["finished"],
    )
    assert run.said == []


def test_a_server_that_is_away_in_the_middle_is_said_once_and_has_everything_once_it_is_back(run: Tracked) -> None:
    run.open().begin()
    run.log(1)
    run.wait_for(1)
    run.server.away = True
    for step in (2, 3):
        run.log(step)
    until(lambda: run.server.refusals >= 3)
    assert run.said == [
        "MLflow failed, the run goes on without it and sends it later what it misses: ConnectionError: "
        "connection refused"
    ]
    run.server.away = False
    run.wait_for(3)
    run.log(4)
    run.close()
    assert run.server.points == [(step, step / 2) for step in (1, 2, 3, 4)], "each once"
    assert run.said[1:] == ["MLflow answers again, and has everything of this run so far"]
    assert run.server.statuses == ["finished"]


def test_a_server_that_is_away_at_the_start_gets_the_first_steps_later(run: Tracked) -> None:
    run.server.away = True
    run.open().begin()
    run.log(1)
    until(lambda: run.server.refusals >= 2)
    run.server.away = False
    run.wait_for(1)
    run.close()
    assert run.server.points == [(1, 0.5)]


def test_a_server_that_is_away_at_the_end_is_waited_for_so_long_and_people_are_told_what_to_do(tmp_path: Path) -> None:
    run = Tracked(RunDirectory(path=tmp_path), close_timeout_s=0.05)
    run.open().begin()
    run.log(1)
    run.wait_for(1)
    run.server.away = True
    run.log(2)
    run.close()
    assert run.server.statuses == [] and len(run.said) == 2
    assert run.said[1] == (
        f"MLflow does not have everything of this run; `megappo track {tmp_path}` sends it what it lacks"
    )


def test_a_server_that_comes_back_while_the_run_ends_gets_the_rest(run: Tracked) -> None:
    run.server.away = True
    run.open().begin()
    run.log(1)
    threading.Timer(0.05, lambda: setattr(run.server, "away", False)).start()
    run.close("interrupted")  # 2 s: the first attempt after the end comes after one
    assert run.server.points == [(1, 0.5)] and run.server.statuses == ["interrupted"]


def test_a_server_that_hangs_holds_up_neither_steps_nor_the_end(tmp_path: Path) -> None:
    run = Tracked(RunDirectory(path=tmp_path), close_timeout_s=0.05)
    run.server.answers.clear()
    run.open().begin()
    for step in range(100):
        run.log(step)
    run.close()
    assert run.said == [
        f"MLflow does not have everything of this run; `megappo track {tmp_path}` sends it what it lacks"
    ]
    run.server.answers.set()


def test_the_bound_of_the_end_counts_from_its_beginning_for_all_trackers_together(tmp_path: Path) -> None:
    run = Tracked(RunDirectory(path=tmp_path), close_timeout_s=1e6)
    run.server.answers.clear()
    run.open().close("finished")
    run.tracker.wait(time.monotonic() - 2e6)  # others were waited for until now; returns at once
    assert len(run.said) == 1
    run.server.answers.set()


def test_nothing_is_sent_before_a_resumed_run_has_cut_its_record(run: Tracked) -> None:
    run.lines.log(1, {"a": 0.5})
    run.lines.log(2, {"a": 1.0})
    run.open()
    run.directory.metrics.write_text('{"step": 1, "a": 0.5}\n')
    run.tracker.begin()
    run.log(2)
    run.close()
    assert run.server.points == [(1, 0.5), (2, 1.0)]


def test_values_are_those_at_the_time_of_the_call(run: Tracked) -> None:
    run.open().begin()
    run.log(0)
    run.wait_for(1)
    run.server.answers.clear()
    values = {"a": 1.0}
    run.tracker.log(1, values)
    values["a"] = 2.0
    run.server.answers.set()
    run.close()
    assert run.server.points == [(0, 0.0), (1, 1.0)]
