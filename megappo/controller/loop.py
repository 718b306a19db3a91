"""The training loop: resume, push weights, validate, step, save, validate, and what is told of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megappo.controller.checkpoints import find_checkpoint, load_checkpoint, save_checkpoint
from megappo.controller.evaluate import evaluate
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.state import LoopState
from megappo.controller.step import Components, StepResult, hand_over, run_ppo_step
from megappo.data.types import Prompt
from megappo.observability.metrics import Metrics


class LoopObserver(Protocol):
    """Whoever watches the loop: console, trackers, rollout log."""

    def on_phase(self, text: str) -> None:
        """Something that takes time begins."""
        ...

    def on_start(self, step: int, checkpoint: Path | None) -> None:
        """The loop goes on after `step` (0: a new run), from a checkpoint if there is one."""
        ...

    def on_step(self, step: int, total_steps: int, result: StepResult) -> None:
        """A step is finished; its metrics hold those of the validation after it, if one was due."""
        ...

    def on_validation(self, step: int, metrics: Metrics, rollouts: ScoredRollouts) -> None:
        """A validation is finished."""
        ...

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is whole."""
        ...


class PPOController:
    """Runs steps until the configured end. Holds no tensors."""

    def __init__(
        self,
        parts: Components,
        *,
        validation: Sequence[Prompt],
        checkpoint_dir: Path,
        observer: LoopObserver,
    ) -> None:
        self.parts = parts
        self.state = LoopState()
        self._validation = validation
        self._checkpoint_dir = checkpoint_dir
        self._observer = observer

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: trainer.total_steps, else total_epochs passes over the prompts."""
        trainer = self.parts.config.trainer
        return trainer.total_steps or trainer.total_epochs * self.parts.sampler.steps_per_epoch

    def prepare(self) -> None:
        """Load the checkpoint to resume from, if any, and give the engines the actor's weights."""
        folder = find_checkpoint(self.parts.config.trainer, self._checkpoint_dir)
        if folder is not None:
            self._observer.on_phase(f"resuming from {folder}")
            self.state = load_checkpoint(self.parts, folder)
        self._observer.on_start(self.state.step, folder)
        self._observer.on_phase("handing the weights to the engines")
        hand_over(self.parts, self.state.step, asleep=False)

    def fit(self) -> LoopState:
        """Run the loop after `prepare`; returns the final state. Raises what a step raises; checkpoints stay."""
        trainer = self.parts.config.trainer
        if trainer.val_before_train:
            self.validate()
        while self.state.step < self.total_steps:
            step = self.state.step + 1
            last = step == self.total_steps
            result = run_ppo_step(
                self.parts, self.state, save=self.save if due(trainer.save_freq, step, last=last) else None
            )
            if due(trainer.test_freq, step, last=last):
                result = StepResult(result.metrics | self.validate(), result.rollouts)
            self._observer.on_step(step, self.total_steps, result)
        return self.state

    def validate(self) -> Metrics:
        """Run validation, tell the observer and return its metrics; none without validation prompts."""
        if not self._validation:
            return {}
        metrics, rollouts = evaluate(self.parts, self._validation)
        self._observer.on_validation(self.state.step, metrics, rollouts)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the current step."""
        keep = self.parts.config.trainer.max_checkpoints
        self._observer.on_checkpoint(save_checkpoint(self.parts, self.state, self._checkpoint_dir, keep=keep))


def due(frequency: int, step: int, *, last: bool) -> bool:
    """Whether something of the given frequency (-1: never) is due after `step`; the last step counts."""
    return frequency > 0 and (last or step % frequency == 0)
