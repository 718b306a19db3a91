"""Engines on a pool of their own, a step ahead, several of them, stopped early: real Ray, real parts."""

import json
from typing import Any

import pytest

from tests.end_to_end.conftest import END_TIMEOUT_S, START_TIMEOUT_S, Launch, Run, assert_all_gone

SHORT = (
    "experiment=quickstart",
    "rollout=hf",
    "placement=split",
    "trainer.val_before_train=false",
    "tracking.trackers=[]",
    "data.validation.size=5510",
)


def column(run: Run, name: str) -> list[float]:
    return [line[name] for line in run.metrics()]


def logged(run: Run) -> list[dict[str, Any]]:
    """The sequences in rollouts/, step after step."""
    files = sorted((run.directory / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_two_engines_a_step_ahead_of_two_data_ranks_stop_early_and_lose_nothing(launch: Launch, sft_run: Run) -> None:
    # The starting model is too poor for a reward; the entropy bonus moves the weights all the same.
    overrides = [*SHORT, "controller=one_step_off", "rollout.num_engines=2", "rollout.partial.extra_prompts=8"]
    overrides += ["actor.parallelism.tensor=1", "algorithm.entropy.coef=0.1"]
    run = launch("train", "ahead", *overrides, "trainer.total_steps=4", "trainer.test_freq=2")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    assert column(run, "weights/version") == [1, 2, 3, 4]
    assert column(run, "rollout/sequences") == [256] * 4
    ids = [sample["sequence_id"] for sample in logged(run)]
    assert len(ids) == len(set(ids)) == 4 * 8
    under_way = [line["rollout/partial/unfinished"] + line["rollout/groups_carried"] for line in run.metrics()]
    assert under_way == [8] * 4, "of 40 prompts 32 are trained, and the others are kept"
    lags = column(run, "rollout/policy_lag/max")
    assert lags[:2] == [0, 1] and max(lags) == 2, "what was kept is a step older than the others"
    # Float32 of two implementations. What the engines got of two data ranks is compared in the later steps below.
    assert run.metrics()[0]["actor/rollout_log_prob_diff/max"] <= 1e-4
    first, *later = column(run, "correction/probability_diff/max")
    assert first <= 1e-4 and min(later) > 1e-3, "the first step's rollouts are of the weights that it trains"
    assert all(0 < weight < 2 for weight in column(run, "correction/weight/mean"))
    assert [line["step"] for line in run.metrics() if "val/reward/mean" in line] == [2, 4]
    for number in range(2):
        assert all(line[f"perf/engine_idle_share/{number}"] < 1 for line in run.metrics()), "both engines sampled"
    # Two devices of the actor, one of each engine.
    shares = [line["perf/tokens_per_s"] / line["perf/tokens_per_s_per_device"] for line in run.metrics()]
    assert shares == pytest.approx([4] * 4)
    assert " = wait " in run.output


@pytest.mark.slow
def test_engines_on_a_pool_of_their_own_sample_the_next_step_while_this_one_trains(
    launch: Launch, sft_run: Run
) -> None:
    # The starting model is too poor for a reward; the entropy bonus moves the weights all the same.
    more = ("controller=one_step_off", "algorithm.entropy.coef=0.1", "trainer.total_steps=4", "trainer.test_freq=2")
    run = launch("train", "one-ahead", *SHORT, *more)
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    assert column(run, "rollout/policy_lag/max") == [0, 1, 1, 1]
    assert column(run, "rollout/policy_lag/mean") == [0, 1, 1, 1]
    assert column(run, "weights/version") == [1, 2, 3, 4]
    assert column(run, "rollout/sequences") == [256] * 4
    ids = [sample["sequence_id"] for sample in logged(run)]
    assert ids == sorted(set(ids)) and len(ids) == 4 * 8
    first, *later = column(run, "correction/probability_diff/max")
    assert first <= 1e-4 and min(later) > 1e-3, "the first step's rollouts are of the weights that it trains"
    assert all(0 < weight < 2 for weight in column(run, "correction/weight/mean"))
    assert [line["step"] for line in run.metrics() if "val/reward/mean" in line] == [2, 4]
    # Two devices of the actor, one of the engine.
    shares = [line["perf/tokens_per_s"] / line["perf/tokens_per_s_per_device"] for line in run.metrics()]
    assert shares == pytest.approx([3] * 4)
    assert " = wait " in run.output


@pytest.mark.slow
def test_two_engines_share_the_prompts_and_stop_early(launch: Launch, sft_run: Run) -> None:
    more = ("rollout.num_engines=2", "rollout.partial.extra_prompts=8", "trainer.total_steps=4", "trainer.test_freq=-1")
    run = launch("train", "two-engines", *SHORT, *more)
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    assert column(run, "rollout/sequences") == [256] * 4
    ids = [sample["sequence_id"] for sample in logged(run)]
    assert len(ids) == len(set(ids)) == 4 * 8
    under_way = [line["rollout/partial/unfinished"] + line["rollout/groups_carried"] for line in run.metrics()]
    assert under_way == [8] * 4, "of 40 prompts 32 are trained, and the others are kept"
    assert run.metrics()[0]["rollout/policy_lag/max"] == 0 and max(column(run, "rollout/policy_lag/max")) >= 1
    assert run.metrics()[0]["actor/rollout_log_prob_diff/max"] <= 1e-4
    for number in range(2):
        assert all(line[f"perf/engine_idle_share/{number}"] < 1 for line in run.metrics()), "both engines sampled"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_engines_are_ahead(launch: Launch, sft_run: Run) -> None:
    run = launch("train", "ahead-interrupted", *SHORT, "controller=one_step_off", "trainer.test_freq=-1")
    run.wait_for_step(2)
    processes = run.descendants()
    run.interrupt()
    assert run.wait(END_TIMEOUT_S) == 130, run.output
    assert run.summary()["exit"] == "interrupted"
    assert_all_gone(processes)


@pytest.mark.slow
def test_sglang_engines_on_a_pool_of_their_own_run_ahead_and_stop_early(launch: Launch, sft_run: Run) -> None:
    overrides = [override for override in SHORT if override != "rollout=hf"]
    overrides += ["controller=one_step_off", "rollout.num_engines=2", "rollout.partial.extra_prompts=8"]
    run = launch("train", "sglang-ahead", *overrides, "trainer.total_steps=4", "trainer.test_freq=2")
    assert run.wait(2 * START_TIMEOUT_S) == 0, run.output
    assert column(run, "weights/version") == [1, 2, 3, 4]
    assert column(run, "rollout/sequences") == [256] * 4
    ids = [sample["sequence_id"] for sample in logged(run)]
    assert len(ids) == len(set(ids)) == 4 * 8
    under_way = [line["rollout/partial/unfinished"] + line["rollout/groups_carried"] for line in run.metrics()]
    assert under_way == [8] * 4
    lags = column(run, "rollout/policy_lag/max")
    assert lags[0] == 0 and lags[1] == 1 and max(lags) >= 2, "what is unfinished is a step older than the others"
    assert run.metrics()[0]["actor/rollout_log_prob_diff/max"] <= 1e-3
    assert [line["step"] for line in run.metrics() if "val/reward/mean" in line] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_engines_take_new_weights_in_the_middle_of_sampling(pause: str, launch: Launch, sft_run: Run) -> None:
    # Eight answers at a time: an update is done long before they all are.
    overrides = [override for override in SHORT if override != "rollout=hf"]
    overrides += ["controller=one_step_off", f"weight_sync.pause={pause}", "rollout.sglang.max_running_requests=8"]
    overrides += ["algorithm.entropy.coef=0.1", "trainer.total_steps=4", "trainer.test_freq=3"]
    run = launch("train", f"beside-{pause}", *overrides)
    assert run.wait(2 * START_TIMEOUT_S) == 0, run.output
    assert "restart" not in run.output, run.output
    assert column(run, "weights/version") == [1, 2, 3, 4]
    assert column(run, "rollout/sequences") == [256] * 4
    lags = column(run, "rollout/policy_lag/mean")
    assert lags[0] == 0 and max(column(run, "rollout/policy_lag/max")) == 1
    assert any(0 < lag < 1 for lag in lags[1:]), "the newer version sampled some of a step's answers, and not all"
    assert [line["step"] for line in run.metrics() if "val/reward/mean" in line] == [3, 4]
