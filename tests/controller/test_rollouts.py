"""What is known of scored rollouts: groups, score parts, metrics."""

from dataclasses import replace
from itertools import permutations

import pytest

from megappo.algo.advantages import signal_by_group
from megappo.algo.dynamic_sampling import decide_sampling
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, DynamicSamplingConfig
from megappo.controller.ports import SequenceInfo
from megappo.controller.rollouts import ScoredRollouts, draw_prompts, rollout_metrics, sequence_inputs
from megappo.controller.state import DrawIds
from megappo.observability.metrics import values
from megappo.rewards.types import Reward
from tests.controller.test_loop import PROMPTS

INFO = SequenceInfo(
    sequence_id=0, group_id=0, prompt_tokens=2, response_tokens=3, finish_reason="stop", policy_version=0, row=0
)


def scored(*rewards: Reward, groups: list[int] | None = None, tokens: list[int] | None = None) -> ScoredRollouts:
    groups, tokens = groups or [0] * len(rewards), tokens or [3] * len(rewards)
    sequences = [
        INFO._replace(sequence_id=number, group_id=group, response_tokens=count)
        for number, (group, count) in enumerate(zip(groups, tokens))
    ]
    return ScoredRollouts(sequences=sequences, rewards=list(rewards), samples={})


def test_a_part_that_some_rewards_lack_is_averaged_over_those_that_have_it() -> None:
    rewards = [Reward(score=1.0), Reward(score=0.0, parts={"fmt": 1.0}), Reward(score=1.0, parts={"acc": 0.5})]
    for order in permutations(rewards):
        found = values(rollout_metrics(scored(*order)))
        assert (found["reward/fmt/mean"], found["reward/acc/mean"]) == (1.0, 0.5)
        assert found["reward/mean"] == pytest.approx(2 / 3)


def test_rollouts_without_sequences_have_no_metrics() -> None:
    assert values(rollout_metrics(scored())) == {}


def test_two_draws_of_one_row_are_two_groups() -> None:
    ids = DrawIds()
    draws = [*draw_prompts(PROMPTS[:1] * 2, ids, num_samples=4), *draw_prompts(PROMPTS[:1], ids, num_samples=4)]
    assert [draw.group_id for draw in draws] == [0, 1, 2]
    assert [draw.sequence_ids for draw in draws] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_empty_sequences_do_not_count_and_a_group_of_them_is_filtered() -> None:
    rewards = [Reward(score=score) for score in (1.0, 0.0, 0.0, 1.0, 5.0)]
    rollouts = scored(*rewards, groups=[0, 0, 1, 1, 1], tokens=[0, 0, 3, 3, 0])
    assert rollouts.scores_by_group() == {0: [], 1: [0.0, 1.0]}
    config = DynamicSamplingConfig(max_rounds=1)
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), sampling=config)
    groups = signal_by_group(sequence_inputs(rollouts, rollouts.scores), algorithm)
    decision = decide_sampling(groups, target=2, rounds=1, config=config)
    assert (decision.kept, decision.filtered) == ([1], [0])


def test_tokens_that_a_program_put_between_turns_are_no_sampled_ones() -> None:
    plain = scored(Reward(score=1.0), Reward(score=0.0))
    assert not any(name.startswith(("rollout/agent", "rollout/sampled")) for name in rollout_metrics(plain))
    made = [
        INFO._replace(sequence_id=0, response_tokens=9, observation_tokens=4, counts={"turns": 3.0, "tool_calls": 2.0}),
        INFO._replace(sequence_id=1, response_tokens=2, observation_tokens=2, counts={"turns": 1.0}),
    ]
    rollouts = replace(plain, sequences=made)
    found = values(rollout_metrics(rollouts))
    assert found["rollout/response_tokens/mean"] == 5.5
    assert found["rollout/sampled_tokens/mean"] == 2.5 and found["rollout/observation_tokens/mean"] == 3
    assert found["rollout/agent/turns/mean"] == 2 and found["rollout/agent/tool_calls/mean"] == 2
    assert sequence_inputs(rollouts, rollouts.scores).response_tokens.tolist() == [5, 0]
    assert rollouts.scores_by_group() == {0: [1.0]}, "without a sampled token a sequence is empty"
