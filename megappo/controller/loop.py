"""The training loop: resume, push weights, validate, then step by step in one of two orders.

Both orders are made of the same hops (`controller.sampling`, `controller.step`), and a step ends the same way in both:
what is due is saved, the engines get the new weights, validation when due, metrics. A loop in another order is one more
method here.

Safe points, where nothing is in flight and a checkpoint holds everything: before the engines get the weights of a step,
and before a step learns from what is sampled. A step of which a checkpoint was made and whose metrics were not told of
before the run was killed is ended by the run that is resumed: nothing of a step is missing or there twice.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megappo.checkpoint.names import step_name
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import deadline_seconds
from megappo.config.rollout import PauseMode
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.controller.ahead import SamplingAhead
from megappo.controller.checkpoints import CheckpointWriter, Restored, load_checkpoint
from megappo.controller.evaluate import evaluate
from megappo.controller.garbage import rare_collection
from megappo.controller.observer import LoopObserver
from megappo.controller.order import engines_take_turns
from megappo.controller.rollout_files import FinishedStep
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.sampling import StepRollouts
from megappo.controller.step import Components, StepResult, hand_over, learn, step_metrics
from megappo.controller.stopping import StopRequest, TimeLimit
from megappo.data.sampler import PromptDraws
from megappo.data.types import Prompt
from megappo.errors import CheckpointError, DamagedCheckpointError, MegappoError
from megappo.observability.metrics import Metrics, merge, total, values
from megappo.observability.run_directory import RunDirectory
from megappo.observability.timing import PhaseTimer


@dataclass(kw_only=True, slots=True)
class _Step:
    """A step under way."""

    number: int
    timer: PhaseTimer
    metrics: list[Metrics] = field(default_factory=list[Metrics])
    trained: ScoredRollouts | None = None
    asleep: bool = False
    """Whether the engines have made room for the trainers."""
    began: float = field(default_factory=time.perf_counter)

    def finished(self) -> FinishedStep:
        """Return what there is of it at the end of its learning, for a run that ends it later."""
        assert self.trained is not None
        so_far: Metrics = {"timing/step_s": total(time.perf_counter() - self.began)}
        return FinishedStep(metrics=merge([*self.metrics, self.timer.metrics(), so_far]), trained=self.trained)


class _EndedEarlyError(Exception):
    """Leaves the loop at a safe point, when the run was asked to end."""


class PPOController:
    """Runs steps until the configured end. Holds no tensors.

    Args:
        validation: the validation sets, by name; a single one is called "".
        resume_from: the checkpoint to go on from, one of the run's own or another one's; None: a new run.
        side_files: further files of every checkpoint, name -> text.
        stop: asks the loop to save and end before its last step.
        time_limit: the same, by the clock; None: that of `checkpoint.save_before_deadline`, from now on.
    """

    def __init__(
        self,
        parts: Components,
        *,
        validation: Mapping[str, Sequence[Prompt]],
        directory: RunDirectory,
        observer: LoopObserver,
        resume_from: Path | None = None,
        side_files: Mapping[str, str] | None = None,
        stop: StopRequest | None = None,
        time_limit: TimeLimit | None = None,
    ) -> None:
        self.parts = parts
        self.step = 0
        """Steps finished; also the version of the weights that the engines hold after the step."""
        self.total_steps = count_steps(parts.config, parts.sampler)
        self._validation = validation
        self._directory = directory
        self._observer = observer
        self._resume_from = resume_from
        self._stop = stop or StopRequest()
        self._time = time_limit or make_time_limit(parts.config)
        self._store = CheckpointStore(directory.checkpoints)
        self.checkpoints = CheckpointWriter(
            parts,
            self._store,
            side_files=side_files or {},
            on_saved=self._saved,
            on_problem=observer.on_problem,
        )
        self._sampled: StepRollouts | None = None
        """What the next step trains on, sampled before the run was resumed."""
        self._to_end: _Step | None = None
        """The step that an earlier process finished and did not tell of."""
        self._failure: CheckpointError | None = None
        """Why the last export failed; None: it did not."""

    def prepare(self, earlier: Callable[[Path], Path | None] = lambda _damaged: None) -> None:
        """Load the checkpoint to resume from, if any, and give the engines the actor's weights.

        Args:
            earlier: names the checkpoint to go on from instead where the ranks find that files of one have changed.
        """
        finished: FinishedStep | None = None
        if (folder := self._resume_from) is not None:
            folder, restored = self._restore(folder, earlier)
            self.step, self._sampled, finished = restored.step, restored.next_step, restored.finished
            if folder.parent.resolve() == self._store.directory.resolve():
                self.checkpoints.saved_step = self.step
                for line in self._store.go_on_from(self.step):
                    self._observer.on_problem(line)
                self.checkpoints.prune()
        told = self._observer.on_start(self.step, folder)
        self._observer.on_phase("handing the weights to the engines")
        timer = PhaseTimer()
        with timer.phase("step"), timer.phase("weight_sync"):
            metrics = hand_over(self.parts, self.step, asleep=False)
        if finished is not None and not told:
            known = [finished.metrics, metrics]
            self._to_end = _Step(number=self.step, timer=timer, metrics=known, trained=finished.trained)

    def _restore(self, folder: Path, earlier: Callable[[Path], Path | None]) -> tuple[Path, Restored]:
        """Load a checkpoint, or an earlier one if its files have changed. Returns which one it was, too."""
        while True:
            self._observer.on_phase(f"resuming from {folder}")
            try:
                return folder, load_checkpoint(self.parts, folder)
            except DamagedCheckpointError as error:
                if (other := earlier(folder)) is None:
                    raise
                self._observer.on_problem(f"{error}; going on from {other}")
                folder = other

    def fit(self) -> bool:
        """Run the loop after `prepare`. Returns whether it came to the last step; else it was asked to end before, and
        a checkpoint says where to go on.

        Raises:
            MegappoError: what a step raises; checkpoints stay, and a save under way is waited for.
            CheckpointError: the last save or export failed, or the last of both; all steps are done.
        """
        try:
            with rare_collection():
                complete = self._run()
        except MegappoError:
            self._save_what_can_be()
            raise
        self.checkpoints.finish()
        if (failure := self.checkpoints.failure or self._failure) is not None:
            raise failure
        return complete

    def _run(self) -> bool:
        if self._to_end is not None:
            self._end_step(self._to_end)
        config = self.parts.config
        if config.trainer.val_before_train and self.step == 0:
            self.validate()
        orders = {
            ControllerKind.synchronous: self._run_synchronous,
            ControllerKind.one_step_off: self._run_one_step_off,
        }
        self._time.begin_steps()
        try:
            orders[config.controller]()
        except _EndedEarlyError:
            return False
        return True

    def _save_what_can_be(self) -> None:
        """After a failure: wait for the save under way; that it fails, too, is no news."""
        try:
            self.checkpoints.finish()
        except MegappoError as error:
            self._observer.on_problem(str(error))

    def _run_synchronous(self) -> None:
        """Sample, learn, hand over: every step trains on what the newest weights sampled."""
        for number in self._numbers():
            self._end_if_asked(self._sampled)
            with self._step(number) as step:
                sampled, self._sampled = self._sampled, None
                sampled = sampled or self.parts.step_sampler.sample(number, step.timer)
                self._end_if_asked(sampled)
                self._learn(step, sampled)
                self._keep(step, lambda: None)
                self._hand_over(step)

    def _run_one_step_off(self) -> None:
        """Sample step k + 1 while step k is learned, hand over between: rollouts are one version old (those of the
        first step are not). What sampling fails with is raised before the next hop of the step that is learned.

        With a `weight_sync.pause` other than `wait`, sampling goes on beside the hand-over, except where something
        else needs it to have ended: a checkpoint, which holds the next step's rollouts, and validation.
        """
        ahead = SamplingAhead(self.parts.step_sampler, begun=self._sampled)
        for number in self._numbers():
            with self._step(number, before_hop=ahead.check) as step:
                sampled = ahead.take(number, step.timer)
                self._end_if_asked(sampled)
                if number < self.total_steps:
                    ahead.begin(number + 1)
                self._learn(step, sampled)
                if self.parts.config.weight_sync.pause is PauseMode.wait:
                    ahead.wait(step.timer)
                self._keep(step, partial(ahead.wait, step.timer))
                self._hand_over(step)
                if self._validation and self._is_due(self.parts.config.trainer.test_freq):
                    ahead.wait(step.timer)

    def _numbers(self) -> range:
        return range(self.step + 1, self.total_steps + 1)

    @contextmanager
    def _step(self, number: int, *, before_hop: Callable[[], None] | None = None) -> Iterator[_Step]:
        """Time the body, then end the step. Where validation is due, no engine works for the loop then."""

        def before() -> None:
            self.checkpoints.poll()
            if before_hop is not None:
                before_hop()

        step = _Step(number=number, timer=PhaseTimer(before))
        self.parts.observation.begin(number)
        with step.timer.phase("step"):
            yield step
        step.metrics.append(self.parts.observation.end(number))
        self._end_step(step)

    def _end_step(self, step: _Step) -> None:
        """Hop 11: validate when due, and tell of the step."""
        assert step.trained is not None
        step.metrics.append(step.timer.metrics())
        seconds = merge(step.metrics)["timing/step_s"].total
        step.metrics.append(step_metrics(self.parts, step.trained, step=step.number, seconds=seconds))
        if self._is_due(self.parts.config.trainer.test_freq):
            step.metrics.append(self.validate())
        step.metrics.append(self.parts.rollout.take_metrics())
        result = StepResult(merge(step.metrics), step.trained)
        # Before the observer: a resumed run does nothing more for a step that was told of.
        self.checkpoints.record_metrics(step.number, values(result.metrics))
        self._observer.on_step(step.number, self.total_steps, result)

    def _learn(self, step: _Step, sampled: StepRollouts) -> None:
        """Hops 3-8."""
        step.trained = sampled.train
        with self.parts.weight_sync.training():
            step.metrics += [sampled.metrics, learn(self.parts, sampled, step=step.number, timer=step.timer)]
        step.asleep = bool(sampled.train.sequences)
        self.step = step.number

    def _keep(self, step: _Step, next_step: Callable[[], StepRollouts | None]) -> None:
        """Hop 9: export and save when due, before the hand-over, whose failure must not cost a checkpoint.

        Args:
            next_step: waits for what the next step trains on, where that is being sampled.
        """
        trainer = self.parts.config.trainer
        self._time.end_step()
        ending = self._ending() if step.number < self.total_steps or self._stop.reason else None
        exports, saves = self._is_due(trainer.export_hf_freq), self._is_due(trainer.save_freq) or ending is not None
        sampled = next_step() if saves else None
        if (exports or saves) and not step.asleep:
            step.asleep = self._make_room()
        with self.parts.weight_sync.training():
            if exports:
                with step.timer.phase("export_hf"):
                    self._export()
            if saves:
                with step.timer.phase("save"):
                    self.checkpoints.save(step.number, next_step=sampled, finished=step.finished())
        if ending is not None:
            self._end(ending)

    def _make_room(self) -> bool:
        """Before something is saved: have engines on the devices of the trainers give up their memory. Returns whether
        they did."""
        if not engines_take_turns(self.parts.config):
            return False
        self.parts.rollout.sleep()
        return True

    def _hand_over(self, step: _Step) -> None:
        """Hop 10: the engines get the new weights."""
        with step.timer.phase("weight_sync"):
            step.metrics.append(hand_over(self.parts, step.number, asleep=step.asleep))

    def validate(self) -> Metrics:
        """Run validation, tell the observer and return its metrics; none without validation prompts."""
        if not self._validation:
            return {}
        evaluation = evaluate(
            self.parts.config,
            self._validation,
            rollout=self.parts.rollout,
            reward=self.parts.reward,
            on_answered=self._observer.on_answered,
        )
        self._observer.on_validation(self.step, evaluation)
        return evaluation.metrics

    def _export(self) -> None:
        """Write the actor as a Hugging Face folder; it gets its name when it is whole."""
        folder = self._directory.exports.resolve() / step_name(self.step)
        try:
            self.parts.actor.save_hf(str(folder))
        except CheckpointError as error:
            self._failure = error
            self._observer.on_problem(f"{folder} was not written: {error}; the run goes on")
        else:
            self._failure = None

    def _saved(self, folder: Path, seconds: float) -> None:
        self._time.note_save(seconds)
        self._observer.on_checkpoint(folder)

    def _ending(self) -> str | None:
        """Return why the run must save and end now, if it must."""
        if self._stop.reason is None and self._time.is_up:
            self._stop.ask("checkpoint.save_before_deadline")
        return self._stop.reason

    def _end_if_asked(self, sampled: StepRollouts | None) -> None:
        """At a safe point between two steps: save unless that is done, and end, when asked to.

        Args:
            sampled: what the step that would begin trains on, if it is sampled already.
        """
        if (reason := self._stop.reason) is None:
            return
        if self.step not in (0, self.checkpoints.saved_step):
            self._make_room()
            with self.parts.weight_sync.training():
                self.checkpoints.save(self.step, next_step=sampled, finished=None)
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._observer.on_phase(f"{reason}: ending after step {self.step}")
        self.checkpoints.finish()
        raise _EndedEarlyError

    def _is_due(self, frequency: int) -> bool:
        """Whether something of the given frequency (-1: never) is due after the current step; the last step counts."""
        return frequency > 0 and (self.step == self.total_steps or self.step % frequency == 0)


def count_steps(config: RunConfig, prompts: PromptDraws) -> int:
    """Return the steps of the whole run: trainer.total_steps, else total_epochs passes over the prompts."""
    return config.trainer.total_steps or config.trainer.total_epochs * prompts.steps_per_epoch


def make_time_limit(config: RunConfig) -> TimeLimit:
    """Return the time of `checkpoint.save_before_deadline`, from now on."""
    text = config.checkpoint.save_before_deadline
    return TimeLimit(None if text is None else deadline_seconds(text))
