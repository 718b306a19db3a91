"""What a step samples in the loop: dynamic sampling, greedy baselines, selected tokens. One process, real maths."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megappo.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    DynamicSamplingConfig,
    OnExhausted,
    PolicyLossConfig,
)
from megappo.config.batching import BatchingConfig
from megappo.controller.sampling import SamplingExhaustedError
from megappo.controller.step import StepResult
from megappo.rewards.types import Reward, Sample
from tests.controller.test_loop import make_config, make_controller, numbers, run


def dynamic(on_exhausted: OnExhausted, *, max_rounds: int = 3) -> AlgorithmConfig:
    sampling = DynamicSamplingConfig(max_rounds=max_rounds, on_exhausted=on_exhausted)
    return AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), sampling=sampling)


def score_of_first_token(sample: Sample) -> Reward:
    """1 when the first token is 3: many groups of two are all 0."""
    return Reward(score=float(sample.response.split()[0] == "3"))


BATCHING = BatchingConfig(prompts_per_step=4, samples_per_prompt=2)


def test_groups_without_signal_are_replaced_and_the_step_trains_on_full_batches(tmp_path: Path) -> None:
    config = make_config(dynamic(OnExhausted.train_partial, max_rounds=20), steps=3, batching=BATCHING)
    controller, recorder = make_controller(config, tmp_path)
    controller.parts.reward.function = score_of_first_token  # type: ignore[attr-defined]
    controller.prepare()
    controller.fit()
    for step in recorder.steps:
        assert step["rollout/groups_without_signal"] == 0
        assert step["rollout/groups"] == 4
        assert step["rollout/sampling_rounds"] > 1


def test_groups_carried_over_are_trained_once_and_keep_their_version(tmp_path: Path) -> None:
    config = make_config(dynamic(OnExhausted.carry_over, max_rounds=1), steps=40, batching=BATCHING)
    controller, recorder = make_controller(config, tmp_path)
    controller.parts.reward.function = score_of_first_token  # type: ignore[attr-defined]
    trained: list[list[tuple[int, int]]] = []
    observe = recorder.on_step

    def keep(step: int, total_steps: int, result: StepResult) -> None:
        trained.append([(info.sequence_id, info.policy_version) for info in result.rollouts.sequences])
        observe(step, total_steps, result)

    recorder.on_step = keep  # type: ignore[method-assign]
    controller.prepare()
    controller.fit()
    sizes = {len(step) for step in trained}
    assert sizes == {0, 8}, "a step trains on a full batch or waits"
    ids = [sequence_id for step in trained for sequence_id, _ in step]
    assert len(ids) == len(set(ids))
    full = next(step for step, found in enumerate(trained) if found)
    assert len({version for _, version in trained[full]}) > 1, "groups of several steps make one batch"
    assert recorder.steps[full]["rollout/policy_version/min"] == min(version for _, version in trained[full])


@pytest.mark.parametrize(("on_exhausted", "updates"), [(OnExhausted.train_partial, 0), (OnExhausted.carry_over, 0)])
def test_a_step_without_any_signal_trains_nothing_and_the_run_goes_on(
    on_exhausted: OnExhausted, updates: int, tmp_path: Path
) -> None:
    config = make_config(dynamic(on_exhausted), steps=2, batching=BATCHING)
    controller, recorder = make_controller(config, tmp_path)
    controller.parts.reward.function = lambda sample: Reward(score=0.0)  # type: ignore[attr-defined]
    controller.prepare()
    controller.fit()
    assert controller.parts.actor.updates == updates  # type: ignore[attr-defined]
    assert [step["rollout/sampling_rounds"] for step in recorder.steps] == [3, 3]
    assert [step["reward/mean"] for step in recorder.steps] == [0, 0]


def test_stop_ends_the_run_with_the_counts(tmp_path: Path) -> None:
    config = make_config(dynamic(OnExhausted.stop, max_rounds=2), steps=2, batching=BATCHING)
    controller, _ = make_controller(config, tmp_path)
    controller.parts.reward.function = lambda sample: Reward(score=0.0)  # type: ignore[attr-defined]
    controller.prepare()
    with pytest.raises(SamplingExhaustedError, match="0 of 8 groups carry signal, 8 filtered"):
        controller.fit()


def one_part_or_the_other(sample: Sample) -> Reward:
    """1 in all, in the one part or in the other: the totals of a group never differ, its parts often do."""
    threes = float(sample.response.split()[0] == "3")
    return Reward(score=1.0, parts={"threes": threes, "others": 1.0 - threes})


def test_gdpo_keeps_groups_whose_parts_differ_while_their_totals_are_equal(tmp_path: Path) -> None:
    algorithm = dynamic(OnExhausted.train_partial, max_rounds=20)
    algorithm.advantage = AdvantageConfig(name="gdpo", reward_keys=["threes", "others"], weights=[2.0, 1.0])
    controller, recorder = make_controller(make_config(algorithm, steps=2, batching=BATCHING), tmp_path)
    controller.parts.reward.function = one_part_or_the_other  # type: ignore[attr-defined]
    controller.prepare()
    controller.fit()
    for step in recorder.steps:
        assert step["rollout/groups"] == 4 and step["rollout/groups_without_signal"] == 0
        assert step["rollout/groups_filtered"] > 0, "those whose parts are equal, too"


def test_remax_gets_a_greedy_answer_per_prompt_that_is_not_trained_on(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="remax"))
    config = make_config(algorithm, steps=1, batching=replace(BATCHING, samples_per_prompt=1))
    controller, steps = run(config, tmp_path)
    assert steps[0]["rollout/sequences"] == 4
    assert controller.parts.step_sampler.position().next_sequence_id == 8
    assert np.isfinite(steps[0]["actor/advantages/mean"])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_selected_tokens_do_not_depend_on_the_layout(name: str, tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(name="grpo"), policy_loss=PolicyLossConfig(name=name, selected_fraction=0.3)
    )
    config = make_config(algorithm, steps=2)
    _, one = run(config, tmp_path)
    _, other = run(config, tmp_path, data=4)
    for metric, series in numbers(one).items():
        assert numbers(other)[metric] == pytest.approx(series, rel=1e-5, abs=1e-6), metric
