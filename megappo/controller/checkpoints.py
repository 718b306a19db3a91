"""Checkpoints of the loop: begun at a safe point, whole once every rank has written its part, then pointed to.

`<run>/checkpoints/step_000050/` holds `loop.json`, `rollouts/` (`controller.rollout_files`), `actor/` and, with a
critic, `critic/`; `checkpoint.store` moves it into place. A save that fails is told of and the run goes on: older
checkpoints are intact, and the next one may succeed. If none does, the run ends with that error.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megappo.checkpoint.disk import explained
from megappo.checkpoint.manifest import FileRecord
from megappo.checkpoint.names import checkpoints_in
from megappo.checkpoint.store import CheckpointStore
from megappo.controller.ports import ActorClient, CriticClient, PendingSave
from megappo.controller.rollout_files import (
    FinishedStep,
    WaitingRollouts,
    read_rollouts,
    read_step,
    write_rollouts,
)
from megappo.controller.sampling import SamplerState, StepRollouts
from megappo.controller.state import DrawPosition, OpenDraw
from megappo.controller.step import Components
from megappo.errors import CheckpointError, MegappoError
from megappo.observability.run_directory import write_atomically

_LOOP_FILE = "loop.json"
_ROLLOUTS = "rollouts"


@dataclass(kw_only=True, slots=True, frozen=True)
class Restored:
    """What a run that is resumed goes on with, beside what its parts have loaded."""

    step: int
    next_step: StepRollouts | None
    """What the next step trains on, if it was sampled before the save."""
    finished: FinishedStep | None
    """The step of the checkpoint; None where it was told of before the save."""


@dataclass(kw_only=True, slots=True)
class _UnderWay:
    """A save that is not whole yet."""

    step: int
    began: float
    roles: dict[str, PendingSave] = field(default_factory=dict[str, PendingSave])


class CheckpointWriter:
    """Saves the state of a run. One thread uses it; at most one save is under way.

    Args:
        side_files: further files of every checkpoint, name -> text (`config.yaml`, `versions.json`).
        on_saved: told of each checkpoint that is whole, with the seconds since it was begun.
        on_problem: told, in words, of what went wrong.
    """

    def __init__(
        self,
        parts: Components,
        store: CheckpointStore,
        *,
        side_files: Mapping[str, str],
        on_saved: Callable[[Path, float], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._store = store
        self._side_files = side_files
        self._on_saved = on_saved
        self._on_problem = on_problem
        self._under_way: _UnderWay | None = None
        self.saved_step: int | None = None
        """The newest step that is saved, or whose save is under way."""
        self.failure: CheckpointError | None = None
        """Why the last save failed; None: it did not."""

    def save(self, step: int, *, next_step: StepRollouts | None, finished: FinishedStep | None) -> None:
        """Save the state after `step`, once the save before is whole. With `checkpoint.asynchronous` it returns when
        everything is copied that later steps change.

        Args:
            next_step: what the next step trains on, if it is sampled already.
            finished: what `step` leaves behind; None if the observer has been told of it.

        Raises:
            MegappoError: a worker or an engine failed. That the disk refuses is no such error (`failure`).
        """
        self.finish()
        under_way, self.saved_step = _UnderWay(step=step, began=time.monotonic()), step
        try:
            self._write(under_way, next_step, finished)
        except CheckpointError as error:
            self._wait_for_ranks(under_way)
            self._fail(step, error)
            return
        except MegappoError:
            self._store.abandon(step)
            raise
        self._under_way = under_way
        if not self._parts.config.checkpoint.asynchronous:
            self.finish()

    def _write(self, under_way: _UnderWay, next_step: StepRollouts | None, finished: FinishedStep | None) -> None:
        """Write the files of the loop, and have the ranks begin with theirs."""
        folder = self._store.begin(under_way.step)
        with explained(f"checkpoint {folder} was not written"):
            self._write_loop(folder, under_way.step, next_step, finished)
            for role, client in _roles(self._parts).items():
                (folder / role).mkdir()
                asynchronous = self._parts.config.checkpoint.asynchronous
                under_way.roles[role] = client.save(str(folder / role), asynchronous=asynchronous)

    def _write_loop(
        self, folder: Path, step: int, next_step: StepRollouts | None, finished: FinishedStep | None
    ) -> None:
        sampler = self._parts.step_sampler
        state = sampler.state()
        loop = {
            "step": step,
            "weight_version": step,
            "position": asdict(state.position),
            "kl_coefficient": self._parts.kl_coefficient.state_dict(),
        }
        write_atomically(folder / _LOOP_FILE, json.dumps(loop, indent=1))
        for name, text in self._side_files.items():
            write_atomically(folder / name, text)
        waiting = WaitingRollouts(carried=state.carried, unfinished=sampler.unfinished_ids, next_step=next_step)
        write_rollouts(folder / _ROLLOUTS, waiting, finished, read=self._parts.rollout.read)

    def poll(self) -> None:
        """Move the save under way into place if all ranks are done; never waits for them."""
        if self._under_way is not None and all(save.done() for save in self._under_way.roles.values()):
            self.finish()

    def finish(self) -> None:
        """Wait until no save is under way. Raises MegappoError as `save`."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        step = under_way.step
        try:
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
        """Note the metric of `checkpoint.keep_best`, which is known after a step is saved."""
        keep = self._parts.config.checkpoint
        if step != self.saved_step or keep.keep_best is None or keep.keep_best not in numbers:
            return
        try:
            self._store.record_score(step, keep.keep_best, numbers[keep.keep_best])
        except CheckpointError as error:
            self._on_problem(str(error))
        else:
            self.prune()

    def prune(self) -> None:
        """Remove what nothing keeps; that it cannot be removed costs space, not the run."""
        try:
            self._store.prune(self._parts.config.checkpoint)
        except CheckpointError as error:
            self._on_problem(str(error))


def load_checkpoint(parts: Components, folder: Path) -> Restored:
    """Restore models, optimizers, draws, KL controller and the tokens that the engines held.

    Raises:
        CheckpointError: a file is damaged, or does not fit the models.
        DataError: it was made with other prompts.
    """
    try:
        # Any: JSON
        loop: dict[str, Any] = json.loads((folder / _LOOP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _LOOP_FILE} cannot be read: {error}") from error
    carried, next_step, held = read_rollouts(folder / _ROLLOUTS)
    open_draws = [OpenDraw(**draw) for draw in loop["position"]["open_draws"]]
    position = DrawPosition(**(loop["position"] | {"open_draws": open_draws}))
    parts.step_sampler.restore(SamplerState(position=position, carried=carried))
    for role, client in _roles(parts).items():
        client.load(str(folder / role))
    parts.rollout.adopt(held)
    parts.kl_coefficient.load_state_dict(loop["kl_coefficient"])
    return Restored(step=loop["step"], next_step=next_step, finished=read_step(folder / _ROLLOUTS))


def _roles(parts: Components) -> dict[str, ActorClient | CriticClient]:
    """Return the models that a checkpoint holds, by the names of their folders."""
    roles: dict[str, ActorClient | CriticClient] = {"actor": parts.actor}
    if parts.critic is not None:
        roles["critic"] = parts.critic
    return roles
