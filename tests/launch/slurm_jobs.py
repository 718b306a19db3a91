"""A Slurm of two nodes on this machine and its jobs, for tests."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.launch.real_runs import ROOT, descendants, environment, wait_until


@dataclass(frozen=True)
class Slurm:
    """Where its configuration is, and the folder from which jobs are submitted."""

    configuration: Path
    work: Path

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm, or a script that gives it jobs, prints."""
        settings = environment(SLURM_CONF=str(self.configuration), MEGAPPO_HOME=str(ROOT))
        done = subprocess.run(command, cwd=self.work, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def shown(self, job: str, name: str) -> str:
        """Return what Slurm says of a job: the value of a name such as `JobState`."""
        found = re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", job))
        assert found is not None
        return found.group(1)

    def log(self, name: str) -> str:
        return (self.work / name).read_text(errors="replace")

    def is_queued(self, job: str) -> bool:
        return self.shown(job, "JobState") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def wait_for(self, job: str, name: str, text: str, *, times: int = 1) -> None:
        """Wait until a job has written a text into one of its logs so many times."""
        path = self.work / name
        self._wait(job, lambda: path.exists() and path.read_text(errors="replace").count(text) >= times, path)

    def wait_for_state(self, job: str, *states: str) -> None:
        self._wait(job, lambda: self.shown(job, "JobState") in states, self.work / f"megappo-{job}-node0.log")

    def cancel_all(self) -> None:
        """End all jobs, and wait for the nodes to be free."""
        self.ask("scancel", "--user=root")
        wait_until(lambda: not self.ask("squeue", "--noheader"), lambda: True, self.configuration)

    def processes(self, job: str) -> list[psutil.Process]:
        """Return all processes of a job on this machine, which has both nodes."""
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # gone, or none of ours
                settings = process.environ()
                if (settings.get("SLURM_CONF"), settings.get("SLURM_JOB_ID")) == (str(self.configuration), job):
                    found |= {process, *descendants(process.pid)}
        return list(found)

    def _wait(self, job: str, happened: Callable[[], bool], log: Path) -> None:
        wait_until(happened, lambda: self.is_queued(job), log)


@contextmanager
def slurm_cluster(folder: Path, work: Path) -> Iterator[Slurm]:
    """Start a Slurm, and end it with the block. Skips the test where there is none on this machine."""
    ready, output = folder / "ready", folder / "slurm.out"
    until_killed = ["bash", "-c", f"touch {ready}; exec sleep infinity"]
    with output.open("w") as log:
        cluster = subprocess.Popen(
            [str(ROOT / "tests/launch/slurm_cluster.sh"), str(folder / "slurm"), *until_killed],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:
        wait_until(lambda: ready.exists() or cluster.poll() == 77, lambda: cluster.poll() is None, output)
        if cluster.poll() == 77:
            pytest.skip(output.read_text())
        yield Slurm(configuration=folder / "slurm/slurm.conf", work=work)
    finally:
        for child in psutil.Process(cluster.pid).children() if cluster.poll() is None else ():
            if child.name() == "sleep":
                child.terminate()  # the script then ends its daemons
        cluster.wait(60)
