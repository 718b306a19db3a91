"""The port of whoever watches the loop: console, trackers, rollout log."""

from pathlib import Path
from typing import Protocol

from megappo.controller.evaluate import Evaluation
from megappo.controller.step import StepResult


class LoopObserver(Protocol):
    """What the loop tells, in the order in which it happens."""

    def on_phase(self, text: str) -> None:
        """Something that takes time begins."""
        ...

    def on_problem(self, text: str) -> None:
        """Something went wrong that does not end the run."""
        ...

    def on_start(self, step: int, checkpoint: Path | None) -> bool:
        """The loop goes on after `step` (0: a new run), from a checkpoint if there is one. Returns whether that step
        needs no telling any more: it was told of in this run, or is another run's."""
        ...

    def on_step(self, step: int, total_steps: int, result: StepResult) -> None:
        """A step is finished; its metrics hold those of the validation after it, if one was due."""
        ...

    def on_answered(self, done: int, expected: int) -> None:
        """So many answers of the validation under way are there."""
        ...

    def on_validation(self, step: int, evaluation: Evaluation) -> None:
        """A validation is finished."""
        ...

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is whole."""
        ...
