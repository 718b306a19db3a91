"""The loop that samples the next step while this one trains: the same parts, another order."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from threading import Condition, Event
from typing import Any

import pytest

from megappo.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionWeightConfig,
    DynamicSamplingConfig,
    KLConfig,
    KLController,
    KLInRewardConfig,
    OldLogProbs,
    OnExhausted,
)
from megappo.config.batching import BatchingConfig
from megappo.config.rollout import PartialConfig, PauseMode, RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.controller.loop import PPOController
from megappo.controller.order import needs_old_log_probs
from megappo.controller.ports import Draw, FinishedGroup, SequenceInfo
from megappo.controller.step import StepResult
from megappo.errors import EngineError, WorkerError
from megappo.observability.metrics import Metrics
from megappo.rewards.types import Reward
from tests.controller.test_loop import Recorder, make_config, make_controller
from tests.fakes.bigram_rollout import FakeRollout
from tests.fakes.one_process import FakeActor, FakeWeightSync

BATCHING = BatchingConfig(prompts_per_step=4, samples_per_prompt=2)
CORRECTED = AlgorithmConfig(
    advantage=AdvantageConfig(name="grpo"),
    old_log_probs=OldLogProbs.recompute,
    correction=CorrectionConfig(weight=CorrectionWeightConfig(high=2.0)),
)
TIMEOUT_S = 60.0
"""Of waits between threads; only a broken loop waits that long."""


def one_step_off(*, steps: int, algorithm: AlgorithmConfig = CORRECTED) -> RunConfig:
    return replace(make_config(algorithm, steps=steps, batching=BATCHING), controller=ControllerKind.one_step_off)


@dataclass
class Trained:
    """What a run trained on, step by step."""

    controller: PPOController
    recorder: Recorder
    steps: list[list[SequenceInfo]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [info.sequence_id for step in self.steps for info in step]

    @property
    def rows(self) -> list[int]:
        """Rows of the prompts, one per group."""
        return [info.row for step in self.steps for info in step[:: BATCHING.samples_per_prompt]]

    @property
    def lags(self) -> list[set[int]]:
        return [{number - info.policy_version for info in step} for number, step in enumerate(self.steps)]


def prepare(config: RunConfig, folder: Path) -> Trained:
    controller, recorder = make_controller(config, folder)
    trained = Trained(controller, recorder)
    observe = recorder.on_step

    def keep(step: int, total_steps: int, result: StepResult) -> None:
        trained.steps.append(result.rollouts.sequences)
        observe(step, total_steps, result)

    recorder.on_step = keep  # type: ignore[method-assign]
    return trained


def run(config: RunConfig, folder: Path) -> Trained:
    trained = prepare(config, folder)
    trained.controller.prepare()
    trained.controller.fit()
    return trained


def calls_of(trained: Trained) -> list[str]:
    return trained.controller.parts.rollout.calls  # type: ignore[attr-defined]


def test_every_rollout_is_trained_once_and_is_at_most_one_version_old(tmp_path: Path) -> None:
    trained = run(one_step_off(steps=7), tmp_path)
    assert trained.ids == list(range(7 * BATCHING.sequences_per_step)), "once, in the order of the draws"
    assert trained.lags == [{0}, *[{1}] * 6]
    steps = trained.recorder.steps
    assert [step["rollout/policy_lag/max"] for step in steps] == [0, 1, 1, 1, 1, 1, 1]
    assert [step["rollout/policy_lag/mean"] for step in steps] == [0, 1, 1, 1, 1, 1, 1]
    assert [step["weights/version"] for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert trained.controller.parts.rollout.stored == {}, "the engines keep nothing"  # type: ignore[attr-defined]


def test_the_prompts_are_those_of_the_synchronous_loop(tmp_path: Path) -> None:
    ahead = run(one_step_off(steps=5), tmp_path)
    synchronous = run(replace(one_step_off(steps=5), controller=ControllerKind.synchronous), tmp_path)
    assert ahead.rows == synchronous.rows
    assert ahead.recorder.steps[0]["reward/mean"] == synchronous.recorder.steps[0]["reward/mean"]
    assert [step["data/epoch"] for step in ahead.recorder.steps] == [
        step["data/epoch"] for step in synchronous.recorder.steps
    ]


def test_engines_never_sleep_and_sample_nothing_that_is_not_trained(tmp_path: Path) -> None:
    calls = calls_of(run(one_step_off(steps=3), tmp_path))
    assert set(calls) == {"push", "generate", "pack"}
    assert (calls.count("push"), calls.count("generate"), calls.count("pack")) == (4, 3, 3)
    assert calls[-2:] == ["pack", "push"]
    pushes = [index for index, call in enumerate(calls) if call == "push"]
    between = [sorted(calls[first + 1 : last]) for first, last in pairwise(pushes)]
    assert between == [["generate", "generate", "pack"], ["generate", "pack"], ["pack"]]


def test_it_learns_with_the_correction(tmp_path: Path) -> None:
    batching = BatchingConfig(prompts_per_step=4, samples_per_prompt=4, ppo_epochs=2)
    steps = run(replace(one_step_off(steps=30), batching=batching), tmp_path).recorder.steps
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    weights = [step["correction/weight/mean"] for step in steps]
    assert weights[0] == pytest.approx(1.0, abs=1e-6), "the first step's rollouts are of the weights that it trains"
    assert all(abs(weight - 1.0) > 1e-6 for weight in weights[1:4])


@pytest.mark.parametrize("steps", [1, 2])
def test_short_runs_end_too(steps: int, tmp_path: Path) -> None:
    assert [len(step) for step in run(one_step_off(steps=steps), tmp_path).steps] == [8] * steps


class Together:
    """Holds the generation of the second step until the first step trains, and that update until generation is on its
    way: a loop that does one after the other never gets past either."""

    def __init__(self, controller: PPOController) -> None:
        self.generating, self.training = Event(), Event()
        rollout, actor = controller.parts.rollout, controller.parts.actor
        assert isinstance(rollout, FakeRollout) and isinstance(actor, FakeActor)
        self._generate, self._update = rollout.generate, actor.update
        rollout.generate = self.generate  # type: ignore[method-assign]
        actor.update = self.update  # type: ignore[method-assign]
        self.calls = 0

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        self.calls += 1
        if self.calls == 2:
            self.generating.set()
            assert self.training.wait(TIMEOUT_S)
        return self._generate(draws, sampling, seed=seed, wanted=wanted)

    def update(self, *arguments: object) -> object:
        self.training.set()
        assert self.generating.wait(TIMEOUT_S)
        return self._update(*arguments)  # type: ignore[arg-type]


def test_engines_sample_the_next_step_while_this_one_trains(tmp_path: Path) -> None:
    trained = prepare(one_step_off(steps=2), tmp_path)
    Together(trained.controller)
    trained.controller.prepare()
    trained.controller.fit()
    assert trained.lags == [{0}, {1}]


class BesideHandOvers:
    """Holds every generation ahead in its middle until the weights of the step that trains are handed over, and those
    until it is in its middle: a loop that waits for the one before the other never gets past."""

    def __init__(self, controller: PPOController) -> None:
        rollout, weight_sync = controller.parts.rollout, controller.parts.weight_sync
        assert isinstance(rollout, FakeRollout) and isinstance(weight_sync, FakeWeightSync)
        self._rollout, self._generate, self._push = rollout, rollout.generate, weight_sync.push
        self._last = controller.total_steps
        self._changed = Condition()
        self._in_middle = 0
        """Generations ahead that came to their middle."""
        self.held: list[int] = []
        """Versions that were handed over while a generation was under way."""
        rollout.generate = self.generate  # type: ignore[method-assign]
        weight_sync.push = self.push  # type: ignore[method-assign]

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        groups = self._generate(draws, sampling, seed=seed, wanted=wanted)
        yield next(groups)
        if threading.current_thread().name not in ("MainThread", "sample-1"):
            with self._changed:
                self._in_middle = ahead = self._in_middle + 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._rollout.version >= ahead, TIMEOUT_S)
        yield from groups

    def push(self, version: int) -> Metrics:
        with self._changed:
            if version in range(1, self._last):
                assert self._changed.wait_for(lambda: self._in_middle == version, TIMEOUT_S)
                self.held.append(version)
            metrics = self._push(version)
            self._changed.notify_all()
        return metrics


def test_weights_are_handed_over_beside_generation_where_that_is_not_waited_for(tmp_path: Path) -> None:
    config = one_step_off(steps=5)
    config.weight_sync.pause = PauseMode.abort
    trained = prepare(config, tmp_path)
    beside = BesideHandOvers(trained.controller)
    trained.controller.prepare()
    trained.controller.fit()
    assert beside.held == [1, 2, 3, 4], "the last step samples nothing ahead"
    assert trained.ids == list(range(5 * BATCHING.sequences_per_step))
    assert trained.controller.parts.rollout.stored == {}  # type: ignore[attr-defined]
    # The newer version goes on with what the older one has begun, and the lag is that of the oldest token.
    assert trained.lags == [{0}, *[{1}] * 4]


def test_what_needs_the_engines_alone_still_waits_for_them(tmp_path: Path) -> None:
    config = one_step_off(steps=6)
    config.weight_sync.pause = PauseMode.abort
    config.trainer.test_freq, config.trainer.save_freq = 2, 3
    trained = run(config, tmp_path)  # the fake engine refuses two calls of generate at a time, and a save beside one
    assert [step for step, _ in trained.recorder.validations] == [2, 4, 6]
    assert [path.name for path in trained.recorder.saved] == ["step_000003", "step_000006"]
    assert trained.rows == run(one_step_off(steps=6), tmp_path / "waiting").rows


def test_validation_uses_the_engines_alone_and_moves_no_draw(tmp_path: Path) -> None:
    plain = run(one_step_off(steps=5), tmp_path)
    config = one_step_off(steps=5)
    config.trainer.test_freq, config.trainer.val_before_train = 2, True
    trained = run(config, tmp_path)  # the fake engine refuses two calls of generate at a time
    assert [step for step, _ in trained.recorder.validations] == [0, 2, 4, 5]
    assert trained.rows == plain.rows and trained.lags == plain.lags
    assert [step["reward/mean"] for step in trained.recorder.steps] == [
        step["reward/mean"] for step in plain.recorder.steps
    ]


def test_an_error_of_the_engines_ends_the_step_that_trains_at_its_next_hop(tmp_path: Path) -> None:
    trained = prepare(one_step_off(steps=5), tmp_path)
    rollout, actor = trained.controller.parts.rollout, trained.controller.parts.actor
    assert isinstance(rollout, FakeRollout) and isinstance(actor, FakeActor)
    generate, compute_log_probs = rollout.generate, actor.compute_log_probs

    def fail_in_step_three(*arguments: Any, **options: Any) -> Iterator[FinishedGroup]:
        if rollout.calls.count("generate") == 2:
            raise EngineError("rollout engine 0 failed")
        return generate(*arguments, **options)

    def compute_after_the_failure(*arguments: Any, **options: Any) -> Any:
        for thread in threading.enumerate():
            if thread.name == "sample-3":
                thread.join(TIMEOUT_S)
        return compute_log_probs(*arguments, **options)

    rollout.generate = fail_in_step_three  # type: ignore[method-assign]
    actor.compute_log_probs = compute_after_the_failure  # type: ignore[method-assign]
    trained.controller.prepare()
    with pytest.raises(EngineError, match="rollout engine 0 failed"):
        trained.controller.fit()
    assert (actor.updates, trained.controller.step) == (1, 1), "step 2 was not trained to its end first"


def test_an_interrupted_loop_does_not_wait_for_the_engines(tmp_path: Path) -> None:
    trained = prepare(one_step_off(steps=5), tmp_path)
    together = Together(trained.controller)

    def interrupt(*arguments: object) -> object:
        assert together.generating.wait(TIMEOUT_S)
        raise KeyboardInterrupt

    trained.controller.parts.actor.update = interrupt  # type: ignore[method-assign,assignment]
    trained.controller.prepare()
    with pytest.raises(KeyboardInterrupt):
        trained.controller.fit()
    assert any(thread.name == "sample-2" and thread.daemon for thread in threading.enumerate()), "still sampling"
    together.training.set()


def stop_in_step(step: int, trained: Trained) -> None:
    """Run until the update of a step, which fails."""
    actor = trained.controller.parts.actor
    assert isinstance(actor, FakeActor)
    update = actor.update

    def fail(*arguments: Any) -> Any:
        if actor.updates == step - 1:
            raise WorkerError("actor rank 0 failed")
        return update(*arguments)

    actor.update = fail  # type: ignore[method-assign]
    trained.controller.prepare()
    with pytest.raises(WorkerError):
        trained.controller.fit()


@pytest.mark.parametrize("extra", [0, 3])
def test_a_resumed_run_neither_skips_nor_repeats_a_prompt(extra: int, tmp_path: Path) -> None:
    kl = KLConfig(in_reward=KLInRewardConfig(coef=0.05, controller=KLController.adaptive, target=0.01, horizon=1000))
    config = one_step_off(steps=8, algorithm=replace(CORRECTED, kl=kl))
    config.rollout.partial.extra_prompts = extra
    whole = run(config, tmp_path / "whole")
    config.trainer.save_freq = 2
    first = prepare(config, tmp_path / "parts")
    stop_in_step(6, first)  # engines have sampled step 6 and maybe 7; the checkpoint is that of step 4
    config.trainer.resume = "auto"
    rest = run(config, tmp_path / "parts")
    assert [len(step) for step in rest.steps] == [8] * 4
    assert rest.recorder.steps[0]["kl/in_reward/coef"] == whole.recorder.steps[4]["kl/in_reward/coef"]
    ids = [*(info.sequence_id for step in first.steps[:4] for info in step), *rest.ids]
    assert len(ids) == len(set(ids)) == 64
    if not extra:
        assert first.steps[:4] == whole.steps[:4]
        assert [*whole.rows[:16], *rest.rows] == whole.rows and ids == whole.ids
    # Drawn and neither trained nor open: none, so what is drawn next is what would have been.
    position = rest.controller.parts.step_sampler.position()
    open_ids = [number for draw in position.open_draws for number in draw.sequence_ids]
    assert sorted([*ids, *open_ids]) == list(range(position.next_sequence_id))


@pytest.mark.parametrize("on_exhausted", [OnExhausted.train_partial, OnExhausted.carry_over])
def test_dynamic_sampling_runs_ahead_too(on_exhausted: OnExhausted, tmp_path: Path) -> None:
    sampling = DynamicSamplingConfig(max_rounds=2, on_exhausted=on_exhausted, oversample=1.5)
    trained = prepare(one_step_off(steps=20, algorithm=replace(CORRECTED, sampling=sampling)), tmp_path)
    reward = trained.controller.parts.reward
    reward.function = lambda sample: Reward(score=float(sample.response[0] == "3"))  # type: ignore[attr-defined]
    trained.controller.prepare()
    trained.controller.fit()
    assert len(trained.ids) == len(set(trained.ids)) > 0
    assert max(len(step) for step in trained.steps) == BATCHING.sequences_per_step
    waiting = trained.controller.parts.step_sampler.carried_ids
    stored = trained.controller.parts.rollout.stored  # type: ignore[attr-defined]
    assert stored.keys() == set(waiting) and not set(waiting) & set(trained.ids)


def test_engines_and_trainers_on_pools_of_their_own_do_not_make_room_for_each_other(tmp_path: Path) -> None:
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="gae")), steps=2)
    config.cluster.rollout = "engines"
    trained = run(config, tmp_path)
    assert "sleep" not in calls_of(trained) and "wake_weights" not in calls_of(trained)
    actor, critic = trained.controller.parts.actor, trained.controller.parts.critic
    hops = ["log-probs", "offload", "update"]
    assert actor.phases == ["push", *hops, "push", *hops, "push"]  # type: ignore[attr-defined]
    assert critic.phases == ["values", "update", "offload"] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"algorithm": AlgorithmConfig()}, False),
        ({"controller": ControllerKind.one_step_off}, False),
        ({"rollout": RolloutConfig(partial=PartialConfig(extra_prompts=1))}, False),
        ({"algorithm": AlgorithmConfig(sampling=DynamicSamplingConfig(max_rounds=1, oversample=2.0))}, False),
        ({"algorithm": AlgorithmConfig(old_log_probs=OldLogProbs.recompute)}, True),
        ({"algorithm": AlgorithmConfig(kl=KLConfig(in_reward=KLInRewardConfig(coef=0.1)))}, True),
        ({"algorithm": AlgorithmConfig(correction=CorrectionConfig(weight=CorrectionWeightConfig()))}, True),
        ({"batching": BatchingConfig(ppo_epochs=2)}, True),
        ({"batching": BatchingConfig(prompts_per_step=8, mini_batch_prompts=4)}, True),
        (
            {
                "controller": ControllerKind.one_step_off,
                "algorithm": AlgorithmConfig(old_log_probs=OldLogProbs.rollout),
            },
            False,
        ),
    ],
)
def test_old_log_probs_are_computed_where_something_reads_them_whoever_sampled(
    changes: dict[str, Any], needed: bool
) -> None:
    config = RunConfig(algorithm=AlgorithmConfig(advantage=AdvantageConfig(name="grpo")))
    assert needs_old_log_probs(replace(config, **changes)) == needed
