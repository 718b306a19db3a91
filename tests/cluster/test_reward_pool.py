"""Scoring processes on a real Ray: what becomes of groups whose rewards fail, and how much time is hidden."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megappo.cluster.reward_pool import PoolScoring, RewardPool
from megappo.cluster.runtime import gather
from megappo.config.reward import FailedReward, RewardConfig, RewardTerms
from megappo.config.run import RunConfig
from megappo.controller.ports import FinishedGroup
from megappo.errors import DataError, MegappoError, RewardError, WorkerError
from megappo.observability.metrics import values
from megappo.rewards import Sample
from tests.cluster.finished_groups import finished_group

REWARDS = "tests.rewards.port_rewards"


def group_of(number: int, *responses: str, reward: str = "") -> FinishedGroup:
    return finished_group(
        number, [Sample(prompt="p", response=response, answer=None, reward=reward) for response in responses]
    )


class Pool:
    """A pool under test, what it told, and where its logs are."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.told: list[str] = []
        self.folder = folder
        self.pool = RewardPool(config, slots=[], log_dir=folder, note=self.told.append)
        (where, *_) = gather(self.pool.start(), phase="start", timeout_s=60.0)
        self.worker = int(where.split()[1])
        """Process of the first worker."""

    def score(self, *groups: FinishedGroup) -> dict[int, Any]:
        scoring = self.pool.begin()
        for group in groups:
            scoring.submit(group)
        return scoring.collect().rewards


def config_with(**limits: Any) -> RunConfig:
    config = RunConfig(reward=RewardConfig(name=f"{REWARDS}:by_word", **limits))
    config.data.train.reward = RewardTerms(name=f"{REWARDS}:scaled", params={"scale": 10.0})
    return config


@pytest.fixture(scope="module")
def _shared(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(tmp_path_factory.mktemp("rewards"), config_with(timeout_s=1.0, workers=2))
    yield made
    made.pool.stop()


Use = Callable[..., Pool]


@pytest.fixture
def use(_shared: Pool) -> Use:
    """The pool of two processes that tests share, with other settings of what a failure means."""

    def with_settings(**settings: Any) -> Pool:
        _shared.pool.config = replace(config_with(timeout_s=1.0, workers=2).reward, **settings)
        return _shared

    return with_settings


@pytest.fixture
def alone(ray_here: None, tmp_path: Path) -> Iterator[Pool]:
    """A pool of one process that a test may break."""
    made = Pool(tmp_path, config_with())
    yield made
    made.pool.stop()


def test_failed_rewards_are_told_of_once_by_kind_and_cost_no_other_its_score(use: Use) -> None:
    made = use(on_failure=FailedReward.drop)
    found = made.score(
        group_of(1, "aa", "loop", "bbb"),
        group_of(2, "raise one", "raise one", "die 3"),
        group_of(3, "nan", "none", "cccc"),
    )
    failures = {number: reward.failure for number, reward in found.items() if reward.failure}
    assert failures == {11: "timed_out", 20: "raised", 21: "raised", 22: "died", 30: "not_finite", 31: "none"}
    assert {number: found[number].score for number in (10, 12, 32)} == {10: 2.0, 12: 3.0, 32: 4.0}
    # Nothing that could be taken for a score.
    assert all(math.isnan(found[number].score) for number in failures)
    assert len(made.told) == 5 and all("on_failure=drop" in line for line in made.told)
    logs = "".join(path.read_text() for path in made.folder.glob("reward-*.log"))
    assert logs.count("ValueError: one\n\n") == 1
    assert "in _loop" in logs, "where it hung"


def test_a_failed_reward_gets_the_configured_score_and_says_so(use: Use) -> None:
    found = use(on_failure=FailedReward.score, failed_score=-2.0).score(group_of(1, "raise x", "abc"))
    assert [(reward.score, reward.failure) for reward in found.values()] == [(-2.0, "raised"), (3.0, None)]


@pytest.mark.parametrize(
    ("response", "error", "text"),
    [
        ("raise x", RewardError, "raised ValueError: x"),
        ("refuse no answer here", DataError, "no answer here"),
    ],
)
def test_a_failed_reward_ends_the_run_where_it_is_to(
    use: Use, response: str, error: type[MegappoError], text: str
) -> None:
    scoring = use(on_failure=FailedReward.stop).pool.begin()
    scoring.submit(group_of(1, response))
    with pytest.raises(error, match=rf"reward worker \d, score: .*{text}.*reward-\d\.log.*on_failure=drop"):
        scoring.collect()
    # What comes later is refused at once, so that generation ends, too.
    with pytest.raises(error):
        scoring.submit(group_of(2, "abc"))


def test_two_generations_at_a_time_get_their_own_rewards(use: Use) -> None:
    made = use()
    one, two = made.pool.begin(), made.pool.begin()
    for number in range(6):
        (one if number % 2 else two).submit(group_of(number, "a" * number))
    assert one.collect().rewards.keys() == {10, 30, 50}
    assert {key: reward.score for key, reward in two.collect().rewards.items()} == {0: 0.0, 20: 2.0, 40: 4.0}


def test_a_sample_is_scored_by_the_reward_of_its_source(use: Use) -> None:
    made = use()
    found = made.score(group_of(1, "abc"), group_of(2, "abc", reward="data.train"))
    assert [found[10].score, found[20].score] == [3.0, 30.0]
    with pytest.raises(DataError, match="the run has none for 'elsewhere'"):
        made.score(group_of(1, "abc", reward="elsewhere"))


def test_a_hanging_sample_does_not_hold_up_those_of_another_process(use: Use) -> None:
    scoring = use(on_failure=FailedReward.drop).pool.begin()
    scoring.submit(group_of(0, "loop"))
    for number in range(1, 40):
        scoring.submit(group_of(number, "abc"))
    wait_for(scoring, 38)  # one group may wait behind the one that hangs
    assert 0 not in scoring.scored_ids
    found = scoring.collect().rewards
    assert [number for number, reward in found.items() if reward.failure == "timed_out"] == [0]


def test_scoring_while_groups_still_come_hides_its_time(use: Use) -> None:
    scoring = use(on_failure=FailedReward.drop).pool.begin()
    for number in range(8):
        scoring.submit(group_of(number, "sleep 0.05"))
    wait_for(scoring, 8)  # generation goes on
    found = scoring.collect()
    # 8 samples of 50 ms on two processes, and nothing left to wait for.
    assert found.busy_s >= 4 * 0.05
    assert values(found.metrics) == {"perf/reward_retries": 0.0, "perf/reward_restarts": 0.0}


def wait_for(scoring: PoolScoring, count: int) -> None:
    deadline = time.monotonic() + 60.0
    while len(scoring.scored_ids) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_dies_is_an_error_and_no_hang(alone: Pool) -> None:
    scoring = alone.pool.begin()
    for number in range(10):
        scoring.submit(group_of(number, "sleep 0.2"))
    threading.Timer(0.3, psutil.Process(alone.worker).kill).start()
    with pytest.raises(WorkerError, match="reward worker 0 failed in score: its process died"):
        scoring.collect()


def test_nothing_is_left_of_a_stopped_pool(alone: Pool, tmp_path: Path) -> None:
    alone.pool.begin().submit(group_of(1, f"child {tmp_path / 'pid'}"))
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    (scorer,) = psutil.Process(alone.worker).children()
    alone.pool.stop()
    _, alive = psutil.wait_procs([scorer], timeout=10)
    assert not alive
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
