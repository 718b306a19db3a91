"""Watches the loop of `megappo train`: console, trackers, rollout log, reward history."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megappo.checkpoint.names import step_name
from megappo.cli.evaluation_report import generation_lines, line_of, print_tables, write_generations
from megappo.cli.run_record import RunRecord
from megappo.config.run import RunConfig
from megappo.config.validation import metric_prefix
from megappo.config.validation_rules import validation_sets_of
from megappo.controller.evaluate import Evaluation
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.step import StepResult
from megappo.observability.busy_table import BUSY_HEADINGS, BusyTable
from megappo.observability.console import RunConsole
from megappo.observability.metrics import values
from megappo.observability.plot import Curve, plot_reward_curve
from megappo.observability.run_directory import RunDirectory, must_be_written
from megappo.observability.run_files import table_rows
from megappo.observability.tracker import Line, RunTracker

_WINDOW = 10
"""Steps averaged at both ends of a run for the summary."""
_DIFFERENCE = "actor/rollout_log_prob_diff/max"


class RunObserver(RunRecord):
    """Port `LoopObserver`: tells people and trackers what the loop does, and writes the summary at the end."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, *, console: RunConsole, trackers: Sequence[RunTracker]
    ) -> None:
        super().__init__(directory, console=console, trackers=trackers)
        self._config = config
        self._recall([])

    def _recall(self, lines: Sequence[Line]) -> None:
        self._rewards: list[tuple[int, float]] = []
        self._validations: dict[str, list[tuple[int, float]]] = {name: [] for name in validation_sets_of(self._config)}
        """Mean reward by set."""
        self._first_difference: float | None = None
        self._weight_version: int | None = None
        self.busy = BusyTable()
        for number, numbers in lines:
            self._remember(number, numbers)

    def on_start(self, step: int, checkpoint: Path | None) -> bool:
        """Go on with the record of a resumed run: what it holds of steps after its checkpoint is dropped, what is
        before counts. A run that begins with another run's checkpoint has a record of its own."""
        if (lines := self._continue(step, checkpoint)) is None:
            return True
        self._directory.drop_steps_after(step)
        return bool(lines) and lines[-1][0] == step

    def on_step(self, step: int, total_steps: int, result: StepResult) -> None:
        """Record a finished step."""
        self.last_step = step
        numbers = values(result.metrics)
        # First, since a step whose line is written counts as told of when the run is resumed.
        self._write_rollouts(step, result.rollouts)
        self._log(step, numbers)
        self._remember(step, numbers)
        self._console.step(step, total_steps, numbers)

    def _remember(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep what the summary and the curve need of one line; that of step 0 is a validation."""
        for name, points in self._validations.items():
            if (metric := f"{metric_prefix(name)}reward/mean") in numbers:
                points.append((step, numbers[metric]))
        if step == 0:
            return
        self._rewards.append((step, numbers["reward/mean"]))
        self._weight_version = round(numbers["weights/version"])
        if self._first_difference is None:
            self._first_difference = numbers.get(_DIFFERENCE)
        self.busy.add(numbers)

    def on_answered(self, done: int, expected: int) -> None:
        """Show how far a validation is."""
        self._console.counted("validating", done, expected)

    def on_validation(self, step: int, evaluation: Evaluation) -> None:
        """Tell of a finished validation; its numbers are in the line of the step before it, which is written later."""
        if step == 0:
            self._log(step, numbers := values(evaluation.metrics))
            self._remember(step, numbers)
        for report in evaluation.reports:
            self._console.note(f"validation after step {step}: {line_of(report, self._config.validation)}")
        if any(report.sources for report in evaluation.reports):
            print_tables(self._console, evaluation.reports, self._config.validation)
        if self._config.validation.save_generations:
            write_generations(self._directory.generations / f"{step_name(step)}.jsonl", evaluation.answered)
            for tracker in self._trackers:
                tracker.table(f"generations/{step_name(step)}", table_rows(generation_lines(evaluation.answered)))

    def _write_rollouts(self, step: int, rollouts: ScoredRollouts) -> None:
        """Append the texts of the first few sequences to rollouts/step_000001.jsonl."""
        shown = [
            (info, reward)
            for info, reward in zip(rollouts.sequences, rollouts.rewards)
            if info.sequence_id in rollouts.samples
        ][: self._config.trainer.num_rollout_samples]
        path = self._directory.rollouts / f"step_{step:06d}.jsonl"
        with must_be_written(path), path.open("w") as file:
            for info, reward in shown:
                sample = rollouts.samples[info.sequence_id]
                line = info._asdict() | {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer}
                line |= {"score": reward.score, "parts": reward.parts, "reward_failure": reward.failure}
                file.write(json.dumps(line) + "\n")

    @property
    def saved(self) -> str:
        """What is on disk, in words."""
        return self._saved(len(self._rewards), "trainer.save_freq")

    def finish(self, exit_reason: str) -> dict[str, object]:
        """Write summary.json and the reward curve, close the trackers; returns the summary."""
        rewards = [reward for _, reward in self._rewards]
        summary: dict[str, object] = {
            "steps": self.last_step,
            "wall_s": self._wall_s,
            "reward_first_10": float(np.mean(rewards[:_WINDOW])) if rewards else None,
            "reward_last_10": float(np.mean(rewards[-_WINDOW:])) if rewards else None,
            "val_reward_first": self._validation_reward(0),
            "val_reward_last": self._validation_reward(-1),
            "log_prob_diff_first_step_max": self._first_difference,
            "weight_version": self._weight_version,
            "exit": exit_reason,
        }
        if rewards:
            plot_reward_curve(
                self._directory.curve,
                title=self._config.run.name,
                training=_curve(self._rewards),
                validation={name or "validation": _curve(points) for name, points in self._validations.items()},
            )
        if rows := self.busy.rows():
            self._console.grid("Busy, of the steps that were traced", BUSY_HEADINGS, rows)
        self._close(summary, exit_reason)
        return summary

    def _validation_reward(self, position: int) -> float | dict[str, float] | None:
        """Return the mean reward of the first (0) or last (-1) validation: by set, where sets have names."""
        found = {name: points[position][1] for name, points in self._validations.items() if points}
        return found.get("") if "" in self._validations else found or None


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    return Curve(steps=[step for step, _ in points], values=[value for _, value in points])
