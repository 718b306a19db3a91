"""Real runs of the command line, in processes of their own, and the starting model they share."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

START_TIMEOUT_S = 240


@dataclass
class Run:
    """One `megappo` process."""

    process: subprocess.Popen[str]
    output_path: Path
    directory: Path

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; a run that does not end in time is killed and fails the test."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the run did not end within {timeout_s} s\n{self.output}")

    def wait_for_step(self, step: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until metrics.jsonl has a line of the given step."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(line["step"] >= step for line in self.metrics()):
                return
            time.sleep(0.2)
        self.kill()
        pytest.fail(f"step {step} was not reached\n{self.output}")

    def kill(self) -> None:
        for process in self.descendants():
            process.kill()
        self.process.kill()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self) -> None:
        """What Ctrl-C in the terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())


Launch = Callable[..., Run]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of all runs: `runs/` is made in it."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def launch(workspace: Path) -> Launch:
    """Start `megappo COMMAND experiment=... overrides...`; the run's name is `name`."""

    def start(command: str, name: str, *overrides: str) -> Run:
        output = workspace / f"{name}.out"
        arguments = [sys.executable, "-m", "megappo", command, *overrides, f"run.name={name}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with output.open("w") as file:
            process = subprocess.Popen(
                arguments,
                cwd=workspace,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return Run(process=process, output_path=output, directory=workspace / "runs" / name)

    return start


@pytest.fixture(scope="session")
def sft_run(launch: Launch) -> Run:
    """A finished supervised run of a few steps."""
    run = launch("sft", "x", "experiment=quickstart", "sft.max_steps=25")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    return run


def assert_all_gone(processes: list[psutil.Process], timeout_s: float = 5.0) -> None:
    """Check that none of the processes is alive (zombies of other parents aside)."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    running = [line for process in alive if (line := command_line_of(process))]
    assert not running, running


def command_line_of(process: psutil.Process) -> list[str]:
    """Command line of a running process; empty when it is gone or a zombie."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline() or [process.name()]
    except psutil.NoSuchProcess:
        return []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run starts in half a minute on an idle machine and in minutes on a busy one; each wait has its own deadline."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
