"""The loop of supervised training over a bigram policy: killed, resumed, stopped, and its checkpoints."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.checkpoint.store import CheckpointStore
from megappo.cli.supervised import SupervisedRunObserver
from megappo.config.checkpoint import BestMode, CheckpointConfig
from megappo.config.supervised import SupervisedConfig
from megappo.config.trainer import RunSection
from megappo.controller.epochs import EpochBatches
from megappo.controller.sft import SftTask
from megappo.controller.stopping import StopRequest, TimeLimit
from megappo.controller.supervised_loop import SupervisedLoop, read_state
from megappo.errors import CheckpointError, DataError
from megappo.observability.console import RunConsole
from megappo.observability.metric_catalogue import MEASURED, undocumented
from megappo.observability.metrics import Metrics
from megappo.observability.run_directory import open_run_directory
from megappo.observability.tracker import JsonlTracker
from tests.controller.test_sft import make_actor, make_task, rows_of
from tests.fakes.one_process import FakeActor


class Killed(BaseException):
    """The process is dead: nothing after it is done."""


@dataclass
class Process:
    """One process of a run in a folder."""

    folder: Path
    actor: FakeActor = field(default_factory=make_actor)
    settings: SupervisedConfig = field(
        default_factory=lambda: SupervisedConfig(epochs=2, batch_tokens=20, test_freq=3, save_freq=2)
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopRequest = field(default_factory=StopRequest)
    time_limit: TimeLimit = field(default_factory=lambda: TimeLimit(None))
    seed: int = 0
    die_in_update: int | None = None
    ask_in_update: int | None = None
    output: io.StringIO = field(default_factory=io.StringIO)

    def run(self, resume: str = "never") -> bool:
        directory = open_run_directory(RunSection(name=self.folder.name, dir=str(self.folder.parent)), resume=resume)
        console = RunConsole(file=self.output, terminal=False)
        trackers = [JsonlTracker(directory.metrics)]
        observer = SupervisedRunObserver(
            directory, console=console, trackers=trackers, names=("sft/loss", "sft/val_loss")
        )
        loop = SupervisedLoop(
            self.task(),
            self.batches(),
            config=self.settings,
            checkpoint=self.checkpoint,
            directory=directory,
            observer=observer,
            side_files={"config.yaml": "{}"},
        )
        loop.prepare((directory.checkpoints / self.pointer) if resume == "auto" else None)
        complete = loop.fit(self.stop, self.time_limit)
        observer.finish("completed" if complete else "interrupted")
        return complete

    def task(self) -> SftTask:
        task = make_task(self.actor)
        update = task.update

        def updating(rows: np.ndarray) -> Metrics:
            metrics = update(rows)
            if self.actor.updates == self.die_in_update:
                raise Killed
            if self.actor.updates == self.ask_in_update:
                self.stop.ask("SIGTERM")
            return metrics

        task.update = updating
        return task

    def batches(self) -> EpochBatches:
        return EpochBatches(
            lengths=rows_of(12, seed=0).lengths,
            fingerprint="f",
            batch_size=self.settings.batch_size,
            batch_tokens=self.settings.batch_tokens,
            seed=self.seed,
            shuffle=True,
        )

    @property
    def pointer(self) -> str:
        return (self.folder / "checkpoints/latest").read_text()

    @property
    def steps_saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step_*"))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What is in metrics.jsonl but the times."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


TOTAL = 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A run that nothing happens to."""
    process = Process(tmp_path_factory.mktemp("whole") / "run")
    assert process.run()
    return process


def test_a_run_writes_a_line_per_step_and_measures_and_saves_when_due(whole: Process) -> None:
    assert [line["step"] for line in whole.lines] == [*range(TOTAL + 1)]
    assert [line["step"] for line in whole.lines if "sft/val_loss" in line] == [0, 3, 6, TOTAL]
    assert whole.lines[-1]["data/epoch"] == 2
    assert sum(line.get("data/rows", 0) for line in whole.lines) == 2 * 12
    assert max(line.get("data/tokens", 0) for line in whole.lines) <= 20
    assert whole.steps_saved == [6, TOTAL]  # checkpoint.keep_last=2
    assert not undocumented(name for line in whole.lines for name in line if name != "step")
    summary = json.loads((whole.folder / "summary.json").read_text())
    assert (summary["steps"], summary["exit"]) == (TOTAL, "completed")
    assert summary["loss_last"] == whole.lines[-1]["sft/loss"]
    assert [summary["held_out_loss_first"], summary["held_out_loss_last"]] == [
        whole.lines[0]["sft/val_loss"],
        whole.lines[-1]["sft/val_loss"],
    ]


@pytest.mark.parametrize("died", [3, 4, 5, TOTAL])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_and_resumed_is_bitwise_the_same(whole: Process, tmp_path: Path, died: int, asynchronous: bool) -> None:
    checkpoint = CheckpointConfig(asynchronous=asynchronous)
    first = Process(tmp_path / "run", die_in_update=died, checkpoint=checkpoint)
    first.actor.gate.set()
    with pytest.raises(Killed):
        first.run()
    second = Process(tmp_path / "run", checkpoint=checkpoint)
    second.actor.gate.set()
    assert second.run("auto")
    assert second.lines == whole.lines
    assert torch.equal(second.actor.table, whole.actor.table)
    assert second.steps_saved == whole.steps_saved


def test_a_run_that_is_asked_to_end_saves_and_goes_on_later(whole: Process, tmp_path: Path) -> None:
    first = Process(tmp_path / "run", ask_in_update=5)
    assert not first.run()
    assert first.steps_saved == [4, 5]
    assert not read_state(first.folder / "checkpoints/step_000005").finished
    assert "SIGTERM: ending after step 5" in first.output.getvalue()
    second = Process(tmp_path / "run")
    assert second.run("auto")
    assert second.lines == whole.lines
    assert torch.equal(second.actor.table, whole.actor.table)


def test_a_run_ends_when_its_time_is_up(tmp_path: Path) -> None:
    clock = iter([0.0, 0.0, 10.0, *[100.0] * 50])
    process = Process(tmp_path / "run", time_limit=TimeLimit(60.0, now=lambda: next(clock)))
    assert not process.run()
    assert process.steps_saved[-1] < TOTAL
    assert process.stop.reason == "checkpoint.save_before_deadline"


def test_a_low_loss_ends_the_run_with_measurement_and_checkpoint(whole: Process, tmp_path: Path) -> None:
    losses = [line["sft/loss"] for line in whole.lines[1:]]
    running, means = losses[0], []
    for loss in losses[1:]:
        running = 0.9 * running + 0.1 * loss
        means.append(running)
    settings = SupervisedConfig(max_steps=50, batch_tokens=20, test_freq=100, save_freq=100, stop_loss=means[2] + 1e-9)
    process = Process(tmp_path / "run", settings=settings)
    assert process.run()
    expected = 2 + next(number for number, value in enumerate(means) if value < means[2] + 1e-9)
    assert [line["step"] for line in process.lines if "sft/val_loss" in line] == [0, expected]
    assert process.steps_saved == [expected]
    assert read_state(process.folder / "checkpoints" / process.pointer).finished


def test_the_best_checkpoint_by_held_out_loss_stays(tmp_path: Path) -> None:
    settings = SupervisedConfig(epochs=2, batch_tokens=20, test_freq=1, save_freq=1)
    keep = CheckpointConfig(keep_last=1, keep_best="sft/val_loss", best_mode=BestMode.min)
    process = Process(tmp_path / "run", settings=settings, checkpoint=keep)
    assert process.run()
    held_out = {line["step"]: line["sft/val_loss"] for line in process.lines if line["step"]}
    best = min(held_out, key=lambda step: held_out[step])
    assert process.steps_saved == sorted({best, TOTAL})


def test_a_kill_after_a_save_does_not_lose_what_the_best_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Killed

    settings = SupervisedConfig(epochs=2, batch_tokens=20, test_freq=1, save_freq=1)
    keep = CheckpointConfig(keep_last=1, keep_best="sft/val_loss", best_mode=BestMode.min)
    process = Process(tmp_path / "run", settings=settings, checkpoint=keep)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(CheckpointStore, "prune", die)
        process.run()
    assert Process(tmp_path / "run", settings=settings, checkpoint=keep).run("auto")
    held_out = {line["step"]: line["sft/val_loss"] for line in process.lines if line["step"]}
    assert min(held_out, key=lambda step: held_out[step]) == 1, "the one whose save was cut short"
    assert process.steps_saved == [1, TOTAL]


def test_a_run_that_ends_before_its_first_step_is_summed_up_with_those_before(whole: Process, tmp_path: Path) -> None:
    directory = open_run_directory(RunSection(name="run", dir=str(whole.folder.parent)), resume="auto")
    console = RunConsole(file=io.StringIO(), terminal=False)
    observer = SupervisedRunObserver(directory, console=console, trackers=[], names=("sft/loss", "sft/val_loss"))
    observer.expect(6, directory.checkpoints / "step_000006")
    summary = observer.finish("interrupted")
    assert (summary["steps"], summary["loss_last"]) == (6, whole.lines[6]["sft/loss"])
    assert summary["held_out_loss_last"] == whole.lines[6]["sft/val_loss"]
    assert len(whole.lines) == TOTAL + 1, "nothing is dropped before the checkpoint is loaded"


def test_other_rows_or_batches_are_refused(whole: Process) -> None:
    with pytest.raises(DataError, match="the checkpoint was made with seed=0, this run has seed=1"):
        Process(whole.folder, seed=1).run("auto")
    settings = SupervisedConfig(batch_tokens=30)
    with pytest.raises(DataError, match="the checkpoint was made with batch_tokens=20"):
        Process(whole.folder, settings=settings).run("auto")


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no checkpoint of supervised training"):
        read_state(tmp_path)
    (tmp_path / "supervised.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"supervised\.json cannot be read"):
        read_state(tmp_path)
