"""What every command of supervised training does around its model: the folder of the run, resuming, signals, trackers,
and telling what became of it. `cli.sft` is an example of its use.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import yaml

from megappo.checkpoint.differences import read_config
from megappo.checkpoint.health import Found
from megappo.cli.resume import earlier_checkpoint, open_run
from megappo.cli.run_record import RunRecord, end_early, make_trackers, run_to_end, say_where
from megappo.cli.signals import StopSignals
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.config.supervised import SupervisedConfig
from megappo.config.trainer import RunSection
from megappo.controller.epochs import EpochBatches
from megappo.controller.loop import make_time_limit
from megappo.controller.stopping import StopRequest, TimeLimit
from megappo.controller.supervised_loop import SupervisedLoop, SupervisedTask, read_state
from megappo.observability.console import RunConsole
from megappo.observability.logging import log_to_file
from megappo.observability.metrics import Metrics, values
from megappo.observability.run_directory import RunDirectory, write_atomically
from megappo.observability.tracker import Line, RunTracker
from megappo.observability.versions import package_versions

_LINE_EVERY = 20
"""Steps between two lines off a terminal."""
_ENDS = ("epochs", "max_steps", "stop_loss")
"""Keys that say when a run is done."""


class SupervisedRunObserver(RunRecord):
    """Port `SupervisedObserver`: tells people and trackers what the loop does, and writes the summary at the end.

    Args:
        names: of the loss among the metrics, and of the held-out loss.
        measures: what else of held-out rows is shown; how people call it -> its name among the metrics.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        console: RunConsole,
        trackers: Sequence[RunTracker],
        names: tuple[str, str],
        measures: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, console=console, trackers=trackers)
        self._loss, self._held_out = names
        self._measures = measures or {}
        self.running_loss: float | None = None
        """Running mean of the loss, after the last step."""
        self._recall([])

    def _recall(self, lines: Sequence[Line]) -> None:
        self._losses: list[float] = []
        self._held_out_losses: list[float] = []
        self._measured: dict[str, float] = {}
        """What else was measured last."""
        for _, numbers in lines:
            self._remember(numbers)

    def on_start(self, step: int, checkpoint: Path | None) -> None:
        """Go on with the record of a resumed run: what it holds of steps after its checkpoint is dropped. A run that
        begins with another run's checkpoint has a record of its own."""
        self._continue(step, checkpoint)

    def on_step(self, step: int, total_steps: int, metrics: Metrics, running_loss: float | None) -> None:
        """Record a finished step; show all of them on a terminal, some of them elsewhere."""
        numbers = values(metrics)
        self.last_step, self.running_loss = step, running_loss
        self._log(step, numbers)
        self._remember(numbers)
        if self._held_out in numbers:
            others = "".join(f", {name} {numbers[metric]:.4f}" for name, metric in self._measures.items())
            self._console.note(f"held-out loss after step {step}: {numbers[self._held_out]:.4f}{others}")
        shown = self._console.is_terminal or step in (1, total_steps) or step % _LINE_EVERY == 0
        if shown and running_loss is not None:
            text = f"loss {numbers[self._loss]:.3f}  running mean {running_loss:.3f}"
            self._console.progress(step, total_steps, text, step_s=numbers["timing/step_s"])

    def _remember(self, numbers: dict[str, float]) -> None:
        self._losses += [numbers[self._loss]] if self._loss in numbers else []
        self._held_out_losses += [numbers[self._held_out]] if self._held_out in numbers else []
        self._measured |= {name: numbers[metric] for name, metric in self._measures.items() if metric in numbers}

    @property
    def saved(self) -> str:
        """What is on disk, in words."""
        return self._saved(len(self._losses), "save_freq")

    def finish(self, exit_reason: str) -> dict[str, object]:
        """Write summary.json, close the trackers; returns the summary."""
        held_out = self._held_out_losses
        summary: dict[str, object] = {
            "steps": self.last_step,
            "wall_s": self._wall_s,
            "loss_first": self._losses[0] if self._losses else None,
            "loss_last": self._losses[-1] if self._losses else None,
            "loss_running_mean": self.running_loss,
            "held_out_loss_first": held_out[0] if held_out else None,
            "held_out_loss_last": held_out[-1] if held_out else None,
            **{f"held_out_{name}_last": value for name, value in self._measured.items()},
            "exit": exit_reason,
        }
        self._close(summary, exit_reason)
        return summary


@dataclass(kw_only=True, slots=True, frozen=True)
class SupervisedRun:
    """What a command works with: everything about its run but the model and the rows."""

    config: RunConfig
    """`run` says where the folder is; the rest is as it was given."""
    settings: SupervisedConfig
    section: str
    """Where the settings are in the configuration."""
    console: RunConsole
    directory: RunDirectory
    observer: SupervisedRunObserver
    stored: str
    """The configuration as it was given, in YAML."""
    found: Found | None
    """The checkpoint that it goes on from."""
    stop: StopRequest
    time_limit: TimeLimit
    signals: StopSignals

    @property
    def result(self) -> Path:
        """Where the trained model goes, a Hugging Face folder."""
        return self.directory.path.resolve() / "model"

    @property
    def is_finished(self) -> bool:
        """Whether an earlier process did all of it: to the same end, with its result."""
        if self.found is None or not self.directory.holds(self.found.folder):
            return False
        saved, wanted = (
            tree.get(self.section, {}) for tree in (read_config(self.found.folder), yaml.safe_load(self.stored))
        )
        same_end = all(saved.get(key) == wanted.get(key) for key in _ENDS)
        return same_end and read_state(self.found.folder).finished and (self.result / "config.json").exists()

    def fit(self, task: SupervisedTask, batches: EpochBatches) -> bool:
        """Run the loop. Returns whether it came to its end."""
        loop = SupervisedLoop(
            task,
            batches,
            config=self.settings,
            checkpoint=self.config.checkpoint,
            directory=self.directory,
            observer=self.observer,
            side_files={"config.yaml": self.stored, "versions.json": json.dumps(package_versions(), indent=1)},
        )
        earlier = partial(earlier_checkpoint, self.config, self.stored, section=self.section)
        loop.prepare(None if self.found is None else self.found.folder.resolve(), earlier)
        self.signals.begin_loop()
        try:
            return loop.fit(self.stop, self.time_limit)
        finally:
            self.signals.end_loop()


def run_supervised(
    config: RunConfig,
    settings: SupervisedConfig,
    work: Callable[[SupervisedRun], bool],
    *,
    console: RunConsole,
    section: str,
    losses: tuple[str, str],
    measures: Mapping[str, str] | None = None,
    next_steps: Callable[[Path], Sequence[str]],
) -> int:
    """Open the folder of a run, do its work and tell what became of it. Returns the exit code, as `megappo train`.

    What can be refused before (rows that cannot be used) should be: an earlier run of the same folder then stays.

    Args:
        settings: the section `section` of the configuration.
        work: trains and writes the result; returns whether it came to its end.
        losses: names of the loss and of the held-out loss among the metrics.
        measures: what else is measured on held-out rows; how people call it -> its name among the metrics.
        next_steps: what to do with the result, one command a line.
    """
    stop, time_limit, stored = StopRequest(), make_time_limit(config), resolved_yaml(config)
    saves = settings.save_freq > 0 or config.checkpoint.save_before_deadline is not None
    signals = StopSignals(stop, grace_s=config.checkpoint.on_signal_s if saves else 0.0)
    output = Path(settings.output)
    config = replace(
        config,
        run=RunSection(name=output.name, dir=str(output.parent)),
        tracking=config.tracking if settings.tracked else replace(config.tracking, trackers=[]),
    )
    directory, found = open_run(config, stored, console.note, section=section)
    write_atomically(directory.config, stored)
    log_to_file(directory.logs / "controller.log")
    trackers = make_trackers(config, directory, console)
    observer = SupervisedRunObserver(directory, console=console, trackers=trackers, names=losses, measures=measures)
    if found is not None:
        observer.expect(found.manifest.step, found.folder)
        observer.running_loss = read_state(found.folder).running_loss
    run = SupervisedRun(
        config=config,
        settings=settings,
        section=section,
        console=console,
        directory=directory,
        observer=observer,
        stored=stored,
        found=found,
        stop=stop,
        time_limit=time_limit,
        signals=signals,
    )
    return _finish(run, work, next_steps)


def _finish(
    run: SupervisedRun, work: Callable[[SupervisedRun], bool], next_steps: Callable[[Path], Sequence[str]]
) -> int:
    """Do the work, and close the run however it ends."""
    console = run.console
    exit_reason, code = run_to_end(
        partial(_work, run, work),
        observer=run.observer,
        console=console,
        signals=run.signals,
        report=partial(_report, run),
    )
    console.lines("Next", list(next_steps(_shown_path(run))) if exit_reason == "completed" else _after_failure(run))
    return code


def _work(run: SupervisedRun, work: Callable[[SupervisedRun], bool]) -> tuple[str, int]:
    if run.is_finished:
        assert run.found is not None
        run.observer.on_start(run.found.manifest.step, run.found.folder)
        done = f"all steps are done already, the result is {_shown_path(run)}"
        run.console.note(f"{done} (more of {run.section}.epochs or {run.section}.max_steps goes on from there)")
        return "completed", 0
    if work(run):
        return "completed", 0
    return end_early(run.stop, run.observer, run.console)


def _shown_path(run: SupervisedRun) -> Path:
    return run.directory.path / "model"


def _report(run: SupervisedRun, summary: dict[str, object]) -> None:
    """Print the summary and where things are."""
    rows = [
        (name, f"{value:.4g}" if isinstance(value, float) else str(value))
        for name, value in summary.items()
        if value is not None
    ]
    run.console.table(f"{run.section}: {run.directory.path}", rows)
    files = {"metrics": run.directory.metrics, "logs": run.directory.logs}
    say_where(run.console, run.directory, files, run.config.tracking)


def _after_failure(run: SupervisedRun) -> list[str]:
    """Return what to do now with a run that did not end well."""
    steps = [f"look into {run.directory.logs}/ (a file per process)"]
    if run.observer.checkpoint is not None:
        steps.append("the same command with resume=auto goes on from the last checkpoint")
    return steps
