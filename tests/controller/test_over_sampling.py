"""Over-sampling: a round draws more prompts than are missing, so that filtering leaves a full step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, DynamicSamplingConfig
from megappo.config.batching import BatchingConfig
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, FinishedGroup
from megappo.controller.sampling import StepRollouts, StepSampler
from megappo.data.sampler import PromptSampler
from megappo.observability.metrics import values
from megappo.observability.timing import PhaseTimer
from megappo.rewards.types import Reward, Sample
from tests.controller.test_loop import PROMPTS, VOCAB, make_config
from tests.fakes.bigram_rollout import FakeRollout
from tests.fakes.one_process import FakeReward

TARGET, SAMPLES = 4, 2


@dataclass
class CountingRollout(FakeRollout):
    """Notes the size of each round."""

    rounds: list[int] = field(default_factory=list)

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        self.rounds.append(len(draws))
        return super().generate(draws, sampling, seed=seed, wanted=wanted)


def config_of(seed: int, sampling: DynamicSamplingConfig) -> RunConfig:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), sampling=sampling)
    batching = BatchingConfig(prompts_per_step=TARGET, samples_per_prompt=SAMPLES)
    return replace(make_config(algorithm, steps=1, batching=batching), seed=seed)


def first_token_is_three(sample: Sample) -> Reward:
    return Reward(score=float(sample.response.split()[0] == "3"))


@dataclass
class Sampled:
    """What some steps sampled; group g has the sequences 2 g and 2 g + 1."""

    steps: list[StepRollouts]
    rounds: list[list[int]]
    """Prompts drawn, per step and round."""
    waiting: set[int]
    """Groups that wait for a later step."""


def sample_steps(config: RunConfig, *, steps: int, three: float = 0.5) -> Sampled:
    """Sample from a policy whose first token is 3, and rewarded, with probability `three`: groups of two carry signal
    with probability 2 three (1 - three)."""
    table = torch.full((VOCAB, VOCAB), float(np.log((1 - three) / (VOCAB - 1))))
    table[:, 3] = float(np.log(three))
    rollout = CountingRollout(table=table, version=0)
    prompts = PromptSampler(PROMPTS, batch_size=TARGET, seed=config.seed, shuffle=True)
    sampler = StepSampler(config, prompts=prompts, rollout=rollout, reward=FakeReward(first_token_is_three))
    found = Sampled(steps=[], rounds=[], waiting=set())
    for step in range(1, steps + 1):
        rollout.rounds = []
        found.steps.append(sampler.sample(step, PhaseTimer()))
        found.rounds.append(rollout.rounds)
        train = [info.sequence_id for info in found.steps[-1].train.sequences]
        rollout.pack([train], forget=found.steps[-1].forget)
    assert rollout.stored.keys() == set(sampler.carried_ids), "engines keep the tokens of what waits and no others"
    found.waiting = {sequence_id // SAMPLES for sequence_id in sampler.carried_ids}
    return found


def test_a_round_draws_the_factor_times_what_is_missing() -> None:
    plain = sample_steps(config_of(0, DynamicSamplingConfig(max_rounds=50)), steps=1)
    more = sample_steps(config_of(0, DynamicSamplingConfig(max_rounds=50, oversample=1.5)), steps=1)
    assert plain.rounds[0][0] == 4 and more.rounds[0][0] == 6


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    oversample=st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.7]),
    three=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_steps_are_full_and_surplus_waits_and_none_is_lost_or_trained_twice(
    seed: int, oversample: float, three: float
) -> None:
    config = config_of(seed, DynamicSamplingConfig(max_rounds=200, oversample=oversample))
    found = sample_steps(config, steps=5, three=three)
    numbers = [values(step.metrics) for step in found.steps]
    per_step = [sorted(step.train.scores_by_group()) for step in found.steps]
    assert [len(groups) for groups in per_step] == [TARGET] * 5, "the factor does not change the size of a step"
    assert all(len(step.train.sequences) == SAMPLES * TARGET for step in found.steps)
    trained = [group for groups in per_step for group in groups]
    assert trained == sorted(set(trained)), "once, in the order of the draws"
    assert all(group > trained[-1] for group in found.waiting)
    dropped = sum(step["rollout/groups_filtered"] for step in numbers)
    assert sum(map(sum, found.rounds)) == len(trained) + len(found.waiting) + dropped
    assert numbers[-1]["rollout/groups_carried"] == len(found.waiting)
    for step, rounds in zip(numbers, found.rounds):
        # A round draws at most ceil(factor * missing) groups, so this many can be too many.
        assert step["rollout/groups_carried"] <= np.ceil((oversample - 1) * TARGET)
        assert step["rollout/sampling_rounds"] == len(rounds)
        assert "reward/mean" in step, "also where those carried over fill the step"


def test_with_a_large_factor_groups_carried_over_can_fill_a_step() -> None:
    found = sample_steps(config_of(3, DynamicSamplingConfig(max_rounds=9, oversample=8.0)), steps=2)
    assert found.rounds[0] == [32] and found.rounds[1] == [], "nothing is sampled while enough waits"


def test_texts_and_greedy_scores_of_groups_that_are_done_are_not_kept() -> None:
    config = config_of(1, DynamicSamplingConfig(max_rounds=200, oversample=2.0))
    config.algorithm.advantage = AdvantageConfig(name="remax")
    for step in sample_steps(config, steps=4).steps:
        groups = {info.group_id for info in step.train.sequences}
        assert step.train.greedy_scores.keys() == groups
        assert step.train.samples.keys() <= {info.sequence_id for info in step.train.sequences}
