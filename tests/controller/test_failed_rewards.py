"""Rewards that fail: their sequences leave the step in every kind of run, nothing is lost, and resume is bitwise."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, DynamicSamplingConfig
from megappo.config.batching import BatchingConfig
from megappo.config.reward import FailedReward
from megappo.config.run import RunConfig
from megappo.controller.evaluate import evaluate
from megappo.controller.rollouts import hidden_time
from megappo.controller.sampling import StepRollouts
from megappo.errors import RewardError
from megappo.observability.metrics import values
from megappo.rewards.types import Reward, Sample
from tests.controller.resumed_runs import CONFIGS, Started, assert_same, die, kill_at, partial, resuming, start
from tests.controller.test_loop import PROMPTS, make_config, make_controller

FAILED = Reward(score=math.nan, failure="raised")
FINE = Reward(score=1.0)


def config_of(name: str, on_failure: FailedReward = FailedReward.drop) -> RunConfig:
    config = CONFIGS[name]()
    config.reward.on_failure = on_failure
    return config


def fails_for_a_third(sample: Sample) -> Reward:
    """Fails for about a third of the texts; of the others: share of threes."""
    if crc32(f"{sample.prompt}>{sample.response}".encode()) % 3 == 0:
        return FAILED
    tokens = sample.response.split()
    return Reward(score=tokens.count("3") / max(1, len(tokens)), parts={"x": 1.0})


def begin(config: RunConfig, folder: Path, reward: Callable[[Sample], Reward] = fails_for_a_third) -> Started:
    run = start(config, folder)
    run.controller.parts.reward.function = reward  # type: ignore[attr-defined]
    return run


def watch(run: Started) -> list[StepRollouts]:
    """Return what every step samples, filled as it runs."""
    steps: list[StepRollouts] = []
    sampler = run.controller.parts.step_sampler
    sample = sampler.sample

    def noting(*args: Any) -> StepRollouts:
        steps.append(sample(*args))
        return steps[-1]

    sampler.sample = noting  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_without_a_score_leave_the_step_and_the_engines(name: str, tmp_path: Path) -> None:
    run = begin(config_of(name), tmp_path / "run")
    steps = watch(run)
    assert run.finish()
    rollout: Any = run.controller.parts.rollout
    sampler = run.controller.parts.step_sampler
    assert rollout.stored.keys() == set(sampler.carried_ids), "engines keep what waits and nothing that was dropped"
    sizes: set[int] = set()
    for step in steps:
        assert all(reward.failure is None for reward in step.train.rewards)
        assert not any(math.isnan(score) for score in step.train.greedy_scores.values())
        sizes |= {len(scores) for scores in step.train.scores_by_group().values()}
    # Groups of unequal sizes are trained; one with a single score left has no signal, which dynamic sampling asks for.
    assert sizes == ({2} if "sampling" in name else {1, 2})
    lines = [line for line in run.lines() if line["step"] > 0]
    assert len(lines) == 6 and sum(line["reward/failed"] for line in lines) > 5
    assert all(line["reward/failed"] == line.get("reward/failed/raised", 0.0) for line in lines)
    trained = [number for line in lines for number in line.values() if isinstance(number, float)]
    assert not any(map(math.isnan, trained))


@pytest.mark.parametrize("name", ["over-sampling", "greedy answers", "one step off, partial"])
def test_a_killed_run_goes_on_bitwise_where_rewards_fail(name: str, tmp_path: Path) -> None:
    whole = begin(config_of(name), tmp_path / "whole")
    assert whole.finish()
    assert_resumes_as(whole, config_of(name), tmp_path / "run")


def test_a_set_score_is_marked_in_the_rollout_log_of_a_resumed_run_too(tmp_path: Path) -> None:
    def sets_score(sample: Sample) -> Reward:
        found = fails_for_a_third(sample)
        return found if found.failure is None else Reward(score=-1.0, failure="timed_out")

    config = config_of("one step off, partial", FailedReward.score)
    whole = begin(config, tmp_path / "whole", sets_score)
    assert whole.finish()
    assert '"reward_failure": "timed_out"' in "".join(whole.answers().values())
    assert_resumes_as(whole, config, tmp_path / "run", sets_score)


def assert_resumes_as(
    whole: Started, config: RunConfig, folder: Path, reward: Callable[[Sample], Reward] = fails_for_a_third
) -> None:
    die(begin(config, folder, reward), lambda run: kill_at(run.controller.parts.actor, "update", 4))
    resumed = begin(resuming(config), folder, reward)
    assert resumed.finish()
    assert_same(resumed, whole)


def sampled_with(config: RunConfig, folder: Path, reward: Callable[[Sample], Reward]) -> tuple[Started, StepRollouts]:
    run = begin(config, folder, reward)
    steps = watch(run)
    assert run.finish()
    return run, steps[0]


def test_a_group_that_has_nothing_left_leaves_the_step(tmp_path: Path) -> None:
    lost = {PROMPTS[0].text, PROMPTS[1].text}

    def by_prompt(sample: Sample) -> Reward:
        return FAILED if sample.prompt in lost else FINE

    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="grpo")), steps=1)
    config.batching = BatchingConfig(prompts_per_step=len(PROMPTS), samples_per_prompt=2)
    config.reward.on_failure = FailedReward.drop
    run, step = sampled_with(config, tmp_path / "run", by_prompt)
    rows = {info.row for info in step.train.sequences}
    assert rows == {prompt.row for prompt in PROMPTS if prompt.text not in lost}
    (line,) = (line for line in run.lines() if line["step"] == 1)
    assert (line["reward/failed"], line["reward/failed_groups"]) == (4.0, 2.0)
    assert line["rollout/sequences"] == 2 * len(rows)


def test_a_group_without_its_greedy_answers_score_leaves_the_step(tmp_path: Path) -> None:
    """Greedy answers are the only ones here that the reward fails on."""
    config = config_of("greedy answers")
    config.trainer.total_steps = 1
    run = begin(config, tmp_path / "run")
    rollout: Any = run.controller.parts.rollout
    finish = rollout._finish
    greedy_groups: list[int] = []

    def marking(draw: Any, answers: Any) -> Any:
        group = finish(draw, answers)
        if draw.greedy:
            greedy_groups.append(draw.group_id)
            group.samples[:] = [replace(sample, response="fail") for sample in group.samples]
        return group

    rollout._finish = marking
    failing = iter([True, False, False, True])
    run.controller.parts.reward.function = (  # type: ignore[attr-defined]
        lambda sample: FAILED if sample.response == "fail" and next(failing) else Reward(score=1.0)
    )
    steps = watch(run)
    assert run.finish()
    assert len(greedy_groups) == 4
    groups = steps[0].train.scores_by_group()
    assert [len(scores) for scores in groups.values()] == [2, 2]
    assert steps[0].train.greedy_scores.keys() == groups.keys()


def test_a_group_that_failed_as_a_whole_is_done_and_not_begun_again(tmp_path: Path) -> None:
    config = partial(config_of("partial"))
    lost = PROMPTS[0].text
    run = begin(config, tmp_path / "run", lambda sample: FAILED if sample.prompt == lost else Reward(score=1.0))
    steps = watch(run)
    assert run.finish()
    trained = [info.group_id for step in steps for info in step.train.sequences]
    assert all(info.row != PROMPTS[0].row for step in steps for info in step.train.sequences)
    assert len(trained) == 2 * len(set(trained)), "no group is trained twice"


@pytest.mark.parametrize("name", ["greedy answers", "dynamic sampling", "partial", "one step off"])
def test_a_step_in_which_nothing_could_be_scored_ends_the_run(name: str, tmp_path: Path) -> None:
    run = begin(config_of(name), tmp_path / "run", lambda sample: FAILED)
    run.controller._validation = {}
    with pytest.raises(RewardError, match=r"nothing of the step can be trained on: \d+ rewards failed \(\d+ raised\)"):
        run.finish()


def test_dynamic_sampling_draws_others_for_groups_that_failed(tmp_path: Path) -> None:
    sampling = DynamicSamplingConfig(max_rounds=50)
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), sampling=sampling), steps=1)
    config.reward.on_failure = FailedReward.drop
    _, step = sampled_with(config, tmp_path / "run", fails_for_a_third)
    assert len(step.train.scores_by_group()) == config.batching.prompts_per_step


def test_a_set_score_keeps_every_sequence(tmp_path: Path) -> None:
    config = config_of("critic and adaptive KL", FailedReward.score)
    failed = Reward(score=-1.0, failure="timed_out")
    run, step = sampled_with(config, tmp_path / "run", lambda sample: failed if "4" in sample.response else FINE)
    assert len(step.train.sequences) == 8
    assert set(step.train.scores) == {-1.0, 1.0}
    assert sum(line["reward/failed/timed_out"] for line in run.lines() if line["step"] == 1) > 0


def test_validation_counts_failed_rewards_and_leaves_them_out(tmp_path: Path) -> None:
    config = config_of("critic and adaptive KL")
    controller, _ = make_controller(config, tmp_path)
    controller.prepare()
    parts = controller.parts
    answers = iter([FAILED, Reward(score=0.25), Reward(score=0.75)])
    parts.reward.function = lambda sample: next(answers)  # type: ignore[attr-defined]
    found = evaluate(config, {"": PROMPTS[:3]}, rollout=parts.rollout, reward=parts.reward)
    assert found.metrics["val/reward/mean"].value == 0.5


@pytest.mark.parametrize(
    ("busy_s", "waited_s", "ratio"), [(10.0, 2.5, 0.75), (10.0, 0.0, 1.0), (10.0, 11.0, 0.0), (0.0, 0.0, None)]
)
def test_hidden_is_what_no_step_waited_for(busy_s: float, waited_s: float, ratio: float | None) -> None:
    expected = {} if ratio is None else {"timing/reward_s": busy_s, "perf/reward_hidden_ratio": ratio}
    assert values(hidden_time(busy_s, waited_s)) == expected


@pytest.mark.parametrize("data", [2, 3])
def test_what_is_left_is_trained_on_any_number_of_ranks(data: int, tmp_path: Path) -> None:
    """Two groups, one with one sequence left: fewer sequences than ranks may be."""
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="grpo")), steps=1)
    config.batching = BatchingConfig(prompts_per_step=2, samples_per_prompt=2)
    config.reward.on_failure = FailedReward.drop
    tables = []
    for ranks in (1, data):
        controller, recorder = make_controller(config, tmp_path / str(ranks), data=ranks)
        answers = iter([FAILED, Reward(score=1.0), Reward(score=0.0), Reward(score=1.0)])
        controller.parts.reward.function = lambda sample, answers=answers: next(answers)  # type: ignore[attr-defined]
        controller._validation = {}
        controller.prepare()
        assert controller.fit()
        assert recorder.steps[0]["rollout/sequences"] == 3
        tables.append(controller.parts.actor.table.detach())  # type: ignore[attr-defined]
    assert tables[0].sub(tables[1]).abs().max() < 1e-6
