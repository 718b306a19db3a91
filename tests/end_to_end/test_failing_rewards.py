"""Runs whose reward fails: for all answers to some prompts, for one answer of the second step, and for all answers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run, assert_all_gone

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES = 8, 4
REWARDS = """
from pathlib import Path

def of_short_words(sample):
    if len(sample.prompt) >= 6:
        raise ValueError(f"{len(sample.prompt)} characters are too long")
    return float(len(sample.response))

def that_breaks_later(sample):
    if Path("runs/stopped/checkpoints/latest").exists():
        raise ConnectionError("the judge is gone")
    return 0.5

def of_nothing(sample):
    return None
"""


@pytest.fixture(scope="module")
def start(launch: Launch, sft_run: Run, workspace: Path) -> Callable[..., Run]:
    """Starts three steps of GRPO that a reward of this file's scores."""
    (workspace / "failing_rewards.py").write_text(REWARDS)

    def started(name: str, reward: str, *overrides: str) -> Run:
        return launch(
            "train",
            name,
            "experiment=quickstart",
            "rollout=hf",
            f"reward.name=failing_rewards:{reward}",
            "reward.params={}",
            f"batching.prompts_per_step={PROMPTS}",
            f"batching.samples_per_prompt={SAMPLES}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.total_steps=3",
            *overrides,
        )

    return started


def test_groups_without_a_score_leave_and_the_run_trains_on_the_others(start: Callable[..., Run]) -> None:
    run = start("dropped", "of_short_words", "reward.on_failure=drop")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    for line in run.metrics():
        gone = line["reward/failed_groups"]
        assert 0 < gone < PROMPTS and line["reward/failed"] == line["reward/failed/raised"] == gone * SAMPLES
        assert line["rollout/sequences"] == (PROMPTS - gone) * SAMPLES
    assert "characters are too long" in run.output
    log = (run.directory / "logs" / "controller.log").read_text()
    assert log.count("Traceback") == 1 and "in of_short_words" in log, "once per kind"


def test_a_reward_that_breaks_ends_the_run_which_keeps_its_checkpoint(start: Callable[..., Run]) -> None:
    run = start("stopped", "that_breaks_later", "trainer.save_freq=1")
    run.wait_for_step(1)
    processes = run.descendants()
    assert run.wait(START_TIMEOUT_S) == 1, run.output
    assert "the judge is gone" in run.output and "resume=auto" in run.output
    assert run.summary()["exit"] == "failed: RewardError"
    assert (run.directory / "checkpoints" / "latest").exists()
    assert_all_gone(processes)


def test_a_reward_that_never_scores_ends_the_run(start: Callable[..., Run]) -> None:
    run = start("unscored", "of_nothing", "reward.on_failure=drop")
    assert run.wait(START_TIMEOUT_S) == 1, run.output
    assert not run.metrics()
    assert "nothing of the step can be trained on: 32 rewards failed (32 none)" in run.output
