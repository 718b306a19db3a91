"""A reward model's workers behind its desk, on a real Ray, beside rule rewards and against transformers."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megappo.cluster.placement import Placement
from megappo.cluster.reward_desk import RewardModelService
from megappo.cluster.reward_pool import RewardPool
from megappo.cluster.runtime import gather
from megappo.config.cluster import ClusterConfig, DeviceKind
from megappo.config.memory import OffloadConfig
from megappo.config.model import ModelConfig
from megappo.config.reward import FailedReward, RewardConfig, RewardTerm, RewardTerms
from megappo.config.rm import RewardModelConfig
from megappo.config.run import RunConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import WorkerError
from megappo.rewards import Sample
from megappo.rewards.model import ModelReward
from tests.cluster.finished_groups import finished_group
from tests.rewards.tiny_reward_model import make_random_reward_model

pytestmark = pytest.mark.slow

LETTERS = character_tokenizer("abcdefghijklmnopqrstuvwxyz")


class Service:
    """A reward model of two data-parallel ranks on a pool of its own, and two scoring processes."""

    def __init__(self, folder: Path, tokenizer_folder: Path) -> None:
        self.model = make_random_reward_model(folder / "model", LETTERS)
        terms = {
            "preference": RewardTerm(name="reward_model", weight=2.0),
            "exact": RewardTerm(name="exact_match", weight=0.5),
        }
        config = RunConfig(
            model=ModelConfig(path=str(tokenizer_folder)),
            reward=RewardConfig(terms=terms, workers=2, on_failure=FailedReward.drop),
            reward_model=RewardModelConfig(path=str(self.model), offload=OffloadConfig(params=True)),
            # A name of its own: pools of several tests live at the same time.
            cluster=ClusterConfig(pools={"scorers": 2}, reward="scorers", device=DeviceKind.cpu),
        )
        config.data.train.reward = RewardTerms(name="exact_match")
        self.placement = Placement(config.cluster, roles={"reward_model": "scorers"}, gpu=False)
        self.service = RewardModelService(config, slots=self.placement.slots("reward_model", 2), log_dir=folder)
        calls = self.service.start()
        self.pool = RewardPool(config, slots=[], log_dir=folder, desk=self.service.client)
        gather([*calls, *self.pool.start()], phase="start", timeout_s=200.0)
        self.said = self.service.client.open()

    def stop(self) -> None:
        self.pool.stop()
        self.service.stop()
        self.placement.remove()


@pytest.fixture(scope="module")
def service(ray_here: None, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("scorers"), tokenizer_folder)
    yield made
    made.stop()


def sample_of(response: str, **changes: Any) -> Sample:
    return replace(Sample(prompt="top>", response=response, answer="pot"), **changes)


def test_scores_are_those_of_transformers_and_are_composed_with_other_terms(service: Service) -> None:
    assert service.said.startswith("the reward model's tokenizer is the policy's")
    samples = [sample_of("pot"), sample_of("pox", finish_reason="length"), sample_of(""), sample_of("abcdefgh" * 5)]
    expected = [reward.score for reward in ModelReward(path=str(service.model)).score(samples)]
    scoring = service.pool.begin()
    for number in range(6):
        scoring.submit(finished_group(number, samples))
    found = scoring.collect()
    for number in range(6):
        rewards = [found.rewards[number * 10 + index] for index in range(len(samples))]
        assert [reward.parts["preference"] for reward in rewards] == pytest.approx(expected, abs=1e-4)
        exact = [reward.parts["exact"] for reward in rewards]
        assert exact == [1.0, 0.0, 0.0, 0.0]
        composed = [2.0 * score + 0.5 * right for score, right in zip(expected, exact)]
        assert [reward.score for reward in rewards] == pytest.approx(composed, abs=1e-4)
    assert found.busy_s > 0


def test_a_text_that_the_model_cannot_take_fails_alone_and_other_rewards_do_not_ask_it(service: Service) -> None:
    scoring = service.pool.begin()
    scoring.submit(finished_group(1, [sample_of("pot"), sample_of("a" * 64)]))
    scoring.submit(finished_group(2, [sample_of("pot" + "a" * 64, reward="data.train")]))
    rewards = scoring.collect().rewards
    assert rewards[10].failure is None
    assert rewards[11].failure == "raised" and math.isnan(rewards[11].score)
    assert (rewards[20].score, rewards[20].failure) == (0.0, None)


def test_a_dead_rank_ends_the_scoring_whatever_is_done_with_failed_rewards(service: Service) -> None:
    """Last: the workers do not come back."""
    ray.kill(service.service.group.workers[1])
    scoring = service.pool.begin()
    scoring.submit(finished_group(1, [sample_of("pot")]))
    with pytest.raises(WorkerError, match=r"reward_model rank 1 .* failed in compute_scores: its process died"):
        scoring.collect()
