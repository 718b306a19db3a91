"""The folder of a run: `<run.dir>/<run.name>/`.

Holds config.yaml (resolved), metrics.jsonl, summary.json, reward_curve.png, mlflow.db, logs/ (a file per process),
rollouts/ (sampled answers), generations/ (answers to validation prompts), records/ (steps written down for replay)
and, where they are asked for, checkpoints/, hf/ (Hugging Face folders of the actor), tensorboard/, traces/ and
profiles/.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from megappo.config.trainer import RunSection
from megappo.errors import MegappoError

PROFILES = "profiles"
"""Folder of the profiles of phases."""
_OWNER = "owner.pid"
"""Process that writes into the folder: its id and when it was started. It is gone when the run has ended."""
_CLOCK_STEP_S = 2.0
"""Least difference between two processes: the system counts from its start, whose time moves with its clock."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path
    moved_aside: Path | None = None
    """Where an earlier run of the same name went; None: there was none, or this run continues it."""

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        return self.path / "reward_curve.png"

    @property
    def database(self) -> Path:
        return self.path / "mlflow.db"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def generations(self) -> Path:
        return self.path / "generations"

    @property
    def records(self) -> Path:
        return self.path / "records"

    @property
    def traces(self) -> Path:
        """Chrome traces of steps."""
        return self.path / "traces"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "hf"

    @property
    def mlflow_run(self) -> Path:
        """Keeps the id of the MLflow run."""
        return self.path / "mlflow_run_id"

    def holds(self, path: Path) -> bool:
        """Whether something is inside the folder, or inside its checkpoints, which may be a link to another disk."""
        own = {self.path.resolve(), self.checkpoints.resolve()}
        return not own.isdisjoint(path.resolve().parents)

    def drop_steps_after(self, step: int) -> None:
        """Remove the files of later steps, which a run that resumes writes anew. Records stay: they may be why the run
        was ended."""
        for path in [*self.rollouts.glob("step_*.jsonl"), *self.generations.glob("step_*.jsonl")]:
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()


def open_run_directory(run: RunSection, *, resume: str = "never") -> RunDirectory:
    """Make the folder of a run. An earlier run of that name is moved to `<name>.1`, `.2`, ... unless `resume`
    (trainer.resume) continues it: `auto` and it holds checkpoints, or the path of a checkpoint inside it.

    Raises:
        MegappoError: a run of that name is still going, or the folder cannot be written.
    """
    path = Path(run.dir) / run.name
    try:
        return _open(path, resume)
    except OSError as error:
        raise MegappoError(
            f"run directory {path} cannot be used: {error} (choose another run.dir or run.name)"
        ) from error


def _open(path: Path, resume: str) -> RunDirectory:
    moved: Path | None = None
    if path.exists() and any(path.iterdir()):
        refuse_if_in_use(path)
        if not _continues(path, resume):
            moved = _free_name(path)
            path.rename(moved)
    directory = RunDirectory(path=path, moved_aside=moved)
    directory.logs.mkdir(parents=True, exist_ok=True)
    directory.rollouts.mkdir(exist_ok=True)
    (path / _OWNER).write_text(f"{os.getpid()} {psutil.Process().create_time()}")
    return directory


def refuse_if_in_use(path: Path) -> None:
    """Raise MegappoError when the process that writes into the folder is alive and has not ended the run."""
    try:
        pid, started = (path / _OWNER).read_text().split()
        # A number is given again after a while, and after a reboot soon: it is the same process only if it is as old.
        age = abs(psutil.Process(int(pid)).create_time() - float(started))
        is_alive = int(pid) != os.getpid() and age < _CLOCK_STEP_S
    except (FileNotFoundError, ValueError, psutil.Error):
        return  # the run has ended, or was killed; perhaps while it wrote this file
    if is_alive:
        raise MegappoError(f"{path} belongs to a run that is still going (pid {pid}); choose another run.name")


def _continues(path: Path, resume: str) -> bool:
    if resume == "never":
        return False
    if resume == "auto":
        # A pointer, or checkpoints without one: `checkpoint.health` says what is wrong. What a kill left is none.
        names = [entry.name for entry in (path / "checkpoints").glob("*")]
        return any(re.fullmatch(r"latest|step_\d+(\.replaced)?", name) for name in names)
    return RunDirectory(path=path).holds(Path(resume))


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


@contextmanager
def must_be_written(path: Path) -> Iterator[None]:
    """Turn what the disk refuses of a file of the run, without which it cannot go on, into a MegappoError."""
    try:
        yield
    except OSError as error:
        remedy = "see to it, for example free some space; then resume=auto goes on from the newest checkpoint"
        raise MegappoError(f"{path} cannot be written: {error.strerror or error} ({remedy})") from error


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text`; a reader sees the old content or the new, also after a crash."""
    content = text.encode("utf-8")
    aside = path.with_name(f"{path.name}.writing")
    write_file(aside, lambda file: file.write(content))
    aside.replace(path)


def write_summary(directory: RunDirectory, summary: Mapping[str, object]) -> None:
    """Write summary.json: the run has ended, and another may have the folder."""
    with must_be_written(directory.summary):
        write_atomically(directory.summary, json.dumps(dict(summary), indent=2) + "\n")
        (directory.path / _OWNER).unlink(missing_ok=True)
