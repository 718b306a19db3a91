"""A real MLflow server that is away at the start, in the middle and at the end of a run."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from megappo.cli.main import main
from megappo.config.record import TrackingConfig
from megappo.observability.background_tracker import close_all
from megappo.observability.run_directory import RunDirectory
from megappo.observability.tracker import WALL_TIME, RunTracker
from megappo.observability.tracker_spec import TrackerSpec
from megappo.observability.trackers import make_run_trackers

START_TIMEOUT_S = 120


class Server:
    """`mlflow server` over one store; it can be stopped and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--backend-store-uri", f"sqlite:///{self._folder / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server")
    yield server
    server.stop()


def log(trackers: list[RunTracker], step: int) -> None:
    for tracker in trackers:
        tracker.log(step, {"reward/mean": step / 4, "actor/loss": -1.0, WALL_TIME: 1e9 + step})


def wait_for(said: list[str], text: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not any(text in line for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_comes_and_goes_has_every_point_once_in_the_end(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    config = TrackingConfig(mlflow_uri=server.url, close_timeout_s=1.0)
    (path / "config.yaml").write_text(f"seed: 1\ntracking:\n  mlflow_uri: {server.url}\n")
    directory, said = RunDirectory(path=path), list[str]()
    trackers = make_run_trackers(TrackerSpec(config=config, run_name="mine", directory=directory), said.append)
    for tracker in trackers:
        tracker.begin()
    log(trackers, 1)
    wait_for(said, "MLflow failed, the run goes on without it")
    server.start()
    wait_for(said, "answers again")
    log(trackers, 2)
    client = MlflowClient(tracking_uri=server.url)
    run_id = directory.mlflow_run.read_text().strip()
    deadline = time.monotonic() + START_TIMEOUT_S
    while client.get_run(run_id).data.metrics.get("reward/mean") != 0.5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.stop()
    said.clear()
    for step in (3, 4):
        log(trackers, step)
    wait_for(said, "MLflow failed")
    server.start()
    wait_for(said, "answers again")
    server.stop()
    log(trackers, 5)
    directory.summary.write_text('{"exit": "completed"}')
    close_all(trackers, "finished")
    assert f"`megappo track {path}` sends it what it lacks" in said[-1]
    server.start()
    assert main(["track", str(path)]) == 0
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and found.data.params["seed"] == "1"
    for name, value in (("reward/mean", 0.25), ("actor/loss", None)):
        points = sorted((point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, name))
        assert points == [(step, step * value if value else -1.0, 1000 * (10**9 + step)) for step in range(1, 6)], (
            "each once, with the time of its step"
        )
    assert {file.path for file in client.list_artifacts(run_id)} == {"config.yaml", "summary.json"}
