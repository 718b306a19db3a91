"""The loop of supervised training: a batch of rows, an optimizer step, held-out loss when due, a line, a checkpoint.

What is trained is behind `SupervisedTask`: `controller.sft` (cross-entropy) and other commands share the loop, and so
the order of rows, resuming, signals, and what is written. A step's line is written before its checkpoint, so a run that
is killed and resumed has every line once: those after its checkpoint are dropped and made anew.

To train something else: a task whose `update` gets the numbers of rows, and a command that makes the loop as
`cli.supervised` does.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megappo.checkpoint.reading import read_object, readable
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import CheckpointConfig
from megappo.config.supervised import SupervisedConfig
from megappo.controller.epochs import EpochBatches
from megappo.controller.saving import CheckpointSaver, SavedModel
from megappo.controller.stopping import StopRequest, TimeLimit
from megappo.errors import CheckpointError, DamagedCheckpointError, MegappoError
from megappo.observability.metrics import Metrics, mean, merge, total, values
from megappo.observability.run_directory import RunDirectory, write_atomically
from megappo.observability.timing import PhaseTimer

STATE_FILE = "supervised.json"
_LOSS_MEMORY = 0.9
"""Weight of the past in the running mean of the loss."""


class SupervisedTask(Protocol):
    """What is trained: a model and its rows."""

    @property
    def loss(self) -> str:
        """Name of the loss among the metrics of `update`; the running mean is taken of it."""
        ...

    @property
    def models(self) -> Mapping[str, SavedModel]:
        """What a checkpoint holds, by the names of the folders in it."""
        ...

    def update(self, rows: np.ndarray) -> Metrics:
        """Take one optimizer step on these rows ([b] int64, ascending); the loss is a mean over all of them, whatever
        the layout."""
        ...

    def validate(self) -> Metrics:
        """Measure the held-out rows, without any effect on the training; nothing where there are none."""
        ...


class SupervisedObserver(Protocol):
    """Whoever watches the loop: console, trackers."""

    def on_phase(self, text: str) -> None:
        """Something that takes time begins."""
        ...

    def on_problem(self, text: str) -> None:
        """Something went wrong that does not end the run."""
        ...

    def on_start(self, step: int, checkpoint: Path | None) -> None:
        """The loop goes on after `step` (0: a new run), from a checkpoint if there is one."""
        ...

    def on_step(self, step: int, total_steps: int, metrics: Metrics, running_loss: float | None) -> None:
        """A step is finished; its metrics hold those of the validation after it, if one was due. Step 0 is a validation
        before the first one, and has no loss."""
        ...

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is whole."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class SupervisedState:
    """What the loop remembers between steps."""

    step: int = 0
    """Steps finished."""
    running_loss: float | None = None
    """Running mean (0.9) of the loss; None before the first step."""
    finished: bool = False
    """Whether `step` is the last one."""


class SupervisedLoop:
    """Runs optimizer steps until the configured end. Holds no tensors.

    Args:
        config: the section of the command.
        checkpoint: how checkpoints are written, and which stay.
        side_files: further files of every checkpoint, name -> text.
    """

    def __init__(
        self,
        task: SupervisedTask,
        batches: EpochBatches,
        *,
        config: SupervisedConfig,
        checkpoint: CheckpointConfig,
        directory: RunDirectory,
        observer: SupervisedObserver,
        side_files: Mapping[str, str],
    ) -> None:
        self.state = SupervisedState()
        self.total_steps = count_steps(config, batches)
        self._task = task
        self._batches = batches
        self._config = config
        self._observer = observer
        self._stop = StopRequest()
        self._time = TimeLimit(None)
        self._store = CheckpointStore(directory.checkpoints)
        self._checkpoints = CheckpointSaver(
            task.models,
            self._store,
            config=checkpoint,
            side_files=side_files,
            on_saved=self._saved,
            on_problem=observer.on_problem,
        )

    def prepare(self, resume_from: Path | None, earlier: Callable[[Path], Path | None] = lambda _damaged: None) -> None:
        """Load the checkpoint to resume from, if any.

        Args:
            resume_from: one of the run's own, or another one's; None: a new run.
            earlier: names the checkpoint to go on from instead where the ranks find that files of one have changed.

        Raises:
            CheckpointError: it is damaged, or does not fit the model.
            DataError: it was made with other rows or batches.
        """
        if (folder := resume_from) is not None:
            folder = self._restore(folder, earlier)
            if folder.parent.resolve() == self._store.directory.resolve():
                self._checkpoints.saved_step = self.state.step
                for line in self._store.go_on_from(self.state.step):
                    self._observer.on_problem(line)
                self._checkpoints.prune()
        self._observer.on_start(self.state.step, folder)

    def _restore(self, folder: Path, earlier: Callable[[Path], Path | None]) -> Path:
        """Load a checkpoint, or an earlier one if its files have changed. Returns which one it was."""
        while True:
            self._observer.on_phase(f"resuming from {folder}")
            try:
                state, data = _read(folder)
                self._batches.check(data)
                for role, model in self._task.models.items():
                    model.load(str(folder / role))
            except DamagedCheckpointError as error:
                if (other := earlier(folder)) is None:
                    raise
                self._observer.on_problem(f"{error}; going on from {other}")
                folder = other
            else:
                self.state = state
                return folder

    def fit(self, stop: StopRequest, time_limit: TimeLimit) -> bool:
        """Run the loop after `prepare`. Returns whether it came to its end; else it was asked to end before, by `stop`
        or by the clock, and a checkpoint says where to go on.

        Raises:
            MegappoError: what a step raises; checkpoints stay, and a save under way is waited for.
            CheckpointError: the last save failed; all steps are done.
        """
        self._stop, self._time = stop, time_limit
        try:
            complete = self._run()
        except MegappoError:
            self._wait_for_save()
            raise
        self._checkpoints.finish()
        if self._checkpoints.failure is not None:
            raise self._checkpoints.failure
        return complete

    def _wait_for_save(self) -> None:
        """After a failure: wait for the save under way; that it fails, too, is no news."""
        try:
            self._checkpoints.finish()
        except MegappoError as error:
            self._observer.on_problem(str(error))

    def _run(self) -> bool:
        if self.state.step == 0 and self._config.test_freq > 0 and (measured := self._task.validate()):
            self._observer.on_step(0, self.total_steps, measured, None)
        self._time.begin_steps()
        while not self._is_done():
            if (reason := self._ending()) is not None:
                self._observer.on_phase(f"{reason}: ending after step {self.state.step}")
                if self.state.step not in (0, self._checkpoints.saved_step):
                    self._save()
                return False
            self._step()
            self._time.end_step()
        return True

    def _is_done(self) -> bool:
        loss, enough = self.state.running_loss, self._config.stop_loss
        return self.state.step >= self.total_steps or (enough is not None and loss is not None and loss < enough)

    def _ending(self) -> str | None:
        """Return why the run must save and end now, if it must."""
        if self._stop.reason is None and self._time.is_up:
            self._stop.ask("checkpoint.save_before_deadline")
        return self._stop.reason

    def _step(self) -> None:
        number, timer = self.state.step + 1, PhaseTimer(self._checkpoints.poll)
        rows = self._batches.rows_of(number)
        with timer.phase("step"):
            with timer.phase("update"):
                measured = [self._task.update(rows)]
            self._count(number, values(measured[0])[self._task.loss])
            if self._is_due(self._config.test_freq):
                with timer.phase("validate"):
                    measured.append(self._task.validate())
        metrics = merge([*measured, timer.metrics(), self._batch_metrics(rows, timer.seconds("step"))])
        self._observer.on_step(number, self.total_steps, metrics, self.state.running_loss)
        self._checkpoints.record_metrics(number, values(metrics))
        if self._is_due(self._config.save_freq):
            self._save()

    def _count(self, number: int, loss: float) -> None:
        """Note a finished step."""
        before = self.state.running_loss
        running = loss if before is None else _LOSS_MEMORY * before + (1 - _LOSS_MEMORY) * loss
        self.state = SupervisedState(step=number, running_loss=running)

    def _batch_metrics(self, rows: np.ndarray, seconds: float) -> Metrics:
        tokens = int(self._batches.lengths[rows].sum())
        return {
            "data/rows": total(len(rows)),
            "data/tokens": total(tokens),
            "data/epoch": mean(self._batches.epochs_after(self.state.step), 1),
            "perf/tokens_per_s": mean(tokens, seconds),
        }

    def _is_due(self, frequency: int) -> bool:
        """Whether something of the given frequency (-1: never) is due after the current step; the last step counts."""
        return frequency > 0 and (self._is_done() or self.state.step % frequency == 0)

    def _save(self) -> None:
        def write(folder: Path) -> None:
            state = asdict(self.state) | {"finished": self._is_done()}
            write_atomically(folder / STATE_FILE, json.dumps({"loop": state, "data": self._batches.state()}, indent=1))

        self._checkpoints.save_with(self.state.step, write)

    def _saved(self, folder: Path, seconds: float) -> None:
        self._time.note_save(seconds)
        self._observer.on_checkpoint(folder)


def count_steps(config: SupervisedConfig, batches: EpochBatches) -> int:
    """Return the steps of the whole run, unless its loss is low enough before: max_steps, else those of all epochs."""
    return config.max_steps or batches.steps_of(config.epochs)


def read_state(folder: Path) -> SupervisedState:
    """Return what the loop of a checkpoint remembers. Raises CheckpointError when it cannot be read."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[SupervisedState, dict[str, Any]]:  # Any: JSON
    path = folder / STATE_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} is no checkpoint of supervised training (it holds no {STATE_FILE})")
    with readable(path):
        content = read_object(path)
        return SupervisedState(**content["loop"]), content["data"]
