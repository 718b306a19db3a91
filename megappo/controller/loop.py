"""The training loop: resume, push weights, validate, then step by step in one of two orders.

Both orders are made of the same hops (`controller.sampling`, `controller.step`), and a step ends the same way in both:
new weights with the engines, validation when due, metrics. A loop in another order is one more method here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megappo.config.trainer import ControllerKind
from megappo.controller.ahead import SamplingAhead
from megappo.controller.checkpoints import find_checkpoint, load_checkpoint, save_checkpoint
from megappo.controller.evaluate import evaluate
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.sampling import StepRollouts
from megappo.controller.state import LoopState
from megappo.controller.step import Components, StepResult, hand_over, learn, step_metrics
from megappo.data.types import Prompt
from megappo.observability.metrics import Metrics, merge
from megappo.observability.timing import PhaseTimer


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


@dataclass(kw_only=True, slots=True)
class _Step:
    """A step under way."""

    number: int
    timer: PhaseTimer
    metrics: list[Metrics] = field(default_factory=list[Metrics])
    trained: ScoredRollouts | None = None


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
        self.state = LoopState(position=parts.step_sampler.position())
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
        config = self.parts.config
        if config.trainer.val_before_train:
            self.validate()
        orders = {
            ControllerKind.synchronous: self._run_synchronous,
            ControllerKind.one_step_off: self._run_one_step_off,
        }
        orders[config.controller]()
        return self.state

    def _run_synchronous(self) -> None:
        """Sample, learn, hand over: every step trains on what the newest weights sampled."""
        for number in self._numbers():
            with self._step(number) as step:
                sampled = self.parts.step_sampler.sample(number, step.timer)
                self._learn(step, sampled)
                self._hand_over(step)

    def _run_one_step_off(self) -> None:
        """Sample step k + 1 while step k is learned, hand over between: rollouts are one version old (those of the
        first step are not). What sampling fails with is raised before the next hop of the step that is learned."""
        ahead = SamplingAhead(self.parts.step_sampler)
        for number in self._numbers():
            with self._step(number, before_hop=ahead.check) as step:
                sampled = ahead.take(number, step.timer)
                if number < self.total_steps:
                    ahead.begin(number + 1)
                self._learn(step, sampled)
                ahead.wait(step.timer)
                self._hand_over(step)

    def _numbers(self) -> range:
        return range(self.state.step + 1, self.total_steps + 1)

    @contextmanager
    def _step(self, number: int, *, before_hop: Callable[[], None] | None = None) -> Iterator[_Step]:
        """Time the body, then hop 11: validate when due, and tell of the step. No engine works for the loop then."""
        step = _Step(number=number, timer=PhaseTimer(before_hop))
        with step.timer.phase("step"):
            yield step
        assert step.trained is not None
        step.metrics.append(step.timer.metrics())
        step.metrics.append(step_metrics(self.parts, step.trained, step=number, seconds=step.timer.seconds("step")))
        if self._is_due(self.parts.config.trainer.test_freq):
            step.metrics.append(self.validate())
        step.metrics.append(self.parts.rollout.take_metrics())
        self._observer.on_step(number, self.total_steps, StepResult(merge(step.metrics), step.trained))

    def _learn(self, step: _Step, sampled: StepRollouts) -> None:
        """Hops 3-9: learn, and save when due, before the hand-over, whose failure must not cost a checkpoint."""
        step.trained = sampled.train
        with self.parts.weight_sync.training():
            step.metrics += [sampled.metrics, learn(self.parts, sampled, step=step.number, timer=step.timer)]
            self.state.step, self.state.position = step.number, sampled.position
            if self._is_due(self.parts.config.trainer.save_freq):
                with step.timer.phase("save"):
                    self.save()

    def _hand_over(self, step: _Step) -> None:
        """Hop 10: the engines get the new weights."""
        assert step.trained is not None
        with step.timer.phase("weight_sync"):
            step.metrics.append(hand_over(self.parts, step.number, asleep=bool(step.trained.sequences)))

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

    def _is_due(self, frequency: int) -> bool:
        """Whether something of the given frequency (-1: never) is due after the current step; the last step counts."""
        step = self.state.step
        return frequency > 0 and (step == self.total_steps or step % frequency == 0)
