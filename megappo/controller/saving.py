"""The saves of a run: each is begun at a safe point, whole once every rank has written its part, then pointed to.

What is in a checkpoint beside the models is the loop's: it hands over a function that writes it (PPO:
`controller.checkpoints`, supervised training: `controller.supervised_loop`). A save that fails is told of and the run
goes on: older checkpoints are intact, and the next one may succeed. If none does, the run ends with that error.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from megappo.checkpoint.disk import explained
from megappo.checkpoint.manifest import FileRecord
from megappo.checkpoint.names import checkpoints_in
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import CheckpointConfig
from megappo.controller.ports import PendingSave
from megappo.errors import CheckpointError, MegappoError
from megappo.observability.run_directory import write_atomically


class SavedModel(Protocol):
    """A model whose state a checkpoint holds."""

    def save(self, folder: str, *, asynchronous: bool = False) -> PendingSave:
        """Write the state into an existing folder (`controller.ports.ActorClient.save`)."""
        ...

    def load(self, folder: str) -> None:
        """Go on from the state in a folder."""
        ...


@dataclass(kw_only=True, slots=True)
class _UnderWay:
    """A save that is not whole yet."""

    step: int
    began: float
    roles: dict[str, PendingSave] = field(default_factory=dict[str, PendingSave])


class CheckpointSaver:
    """Saves the state of a run. One thread uses it; at most one save is under way.

    Args:
        models: what a checkpoint holds, by the names of the folders in it.
        config: how it is written, and which checkpoints stay.
        side_files: further files of every checkpoint, name -> text (`config.yaml`, `versions.json`).
        on_saved: told of each checkpoint that is whole, with the seconds since it was begun.
        on_problem: told, in words, of what went wrong.
    """

    def __init__(
        self,
        models: Mapping[str, SavedModel],
        store: CheckpointStore,
        *,
        config: CheckpointConfig,
        side_files: Mapping[str, str],
        on_saved: Callable[[Path, float], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self._models = models
        self._store = store
        self._config = config
        self._side_files = side_files
        self._on_saved = on_saved
        self._on_problem = on_problem
        self._under_way: _UnderWay | None = None
        self._measured: tuple[int, float] | None = None
        """Step and value of the metric of `checkpoint.keep_best`, the newest that is known."""
        self.saved_step: int | None = None
        """The newest step that is saved, or whose save is under way."""
        self.failure: CheckpointError | None = None
        """Why the last save failed; None: it did not."""

    def save_with(self, step: int, write_loop: Callable[[Path], None]) -> None:
        """Save the state after `step`, once the save before is whole. With `checkpoint.asynchronous` it returns when
        everything is copied that later steps change.

        Args:
            write_loop: writes the files of the loop into the folder that it is given.

        Raises:
            MegappoError: a worker or an engine failed. That the disk refuses is no such error (`failure`).
        """
        self.finish()
        under_way, self.saved_step = _UnderWay(step=step, began=time.monotonic()), step
        try:
            self._write(under_way, write_loop)
        except CheckpointError as error:
            self._wait_for_ranks(under_way)
            self._fail(step, error)
            return
        except MegappoError:
            self._store.abandon(step)
            raise
        self._under_way = under_way
        if not self._config.asynchronous:
            self.finish()

    def _write(self, under_way: _UnderWay, write_loop: Callable[[Path], None]) -> None:
        """Write the files of the loop, and have the ranks begin with theirs."""
        folder = self._store.begin(under_way.step)
        with explained(f"checkpoint {folder} was not written"):
            for name, text in self._side_files.items():
                write_atomically(folder / name, text)
            write_loop(folder)
            for role, model in self._models.items():
                (folder / role).mkdir()
                under_way.roles[role] = model.save(str(folder / role), asynchronous=self._config.asynchronous)

    def poll(self) -> None:
        """Move the save under way into place if all ranks are done; never waits for them."""
        if self._under_way is not None and all(save.done() for save in self._under_way.roles.values()):
            self.finish()

    def finish(self) -> None:
        """Wait until no save is under way. Raises MegappoError as `save_with`."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        step = under_way.step
        try:
            # What is known already is written before the checkpoint is whole: a kill in between must not lose it.
            self._record_score(step)
            folder = self._store.commit(step, self._collect(under_way))
        except CheckpointError as error:
            self._fail(step, error)
            return
        except MegappoError:
            self._store.abandon(step)
            raise
        self.failure = None
        self._on_saved(folder, time.monotonic() - under_way.began)
        self.prune()

    def _collect(self, under_way: _UnderWay) -> list[FileRecord]:
        """Wait for all ranks, those of the other role, too, if one fails: none may write into a folder that goes."""
        records: list[FileRecord] = []
        failure: CheckpointError | None = None
        for role, save in under_way.roles.items():
            try:
                records += [replace(record, path=f"{role}/{record.path}") for record in save.wait()]
            except CheckpointError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return records

    def _wait_for_ranks(self, under_way: _UnderWay) -> None:
        """Wait for what was begun of a save that is given up; one cause of its failure is enough."""
        with suppress(CheckpointError):
            self._collect(under_way)

    def _fail(self, step: int, error: CheckpointError) -> None:
        """Give a save up and tell of it; the run goes on."""
        self._store.abandon(step)
        self.failure, self.saved_step = error, None
        self._on_problem(f"step {step} was not saved: {error}; the run goes on, {self._newest()}")

    def _newest(self) -> str:
        """Say what a run could be resumed from now."""
        checkpoints = list(checkpoints_in(self._store.directory).values())
        return f"the newest checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint"

    def record_metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        """Note the metric of `checkpoint.keep_best`, which may be known before a step is saved, or only afterwards."""
        best = self._config.keep_best
        if best is None or best not in numbers:
            return
        self._measured = step, numbers[best]
        if step == self.saved_step:
            self._record_score(step)
            self.prune()

    def _record_score(self, step: int) -> None:
        """Write the metric of a step beside the checkpoints, if it is known."""
        best = self._config.keep_best
        if best is None or self._measured is None or self._measured[0] != step:
            return
        try:
            self._store.record_score(step, best, self._measured[1])
        except CheckpointError as error:
            self._on_problem(str(error))

    def prune(self) -> None:
        """Remove what nothing keeps; that it cannot be removed costs space, not the run."""
        try:
            self._store.prune(self._config)
        except CheckpointError as error:
            self._on_problem(str(error))
