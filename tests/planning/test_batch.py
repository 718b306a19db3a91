"""The algebra of a step, against the schedules that a run makes."""

import math

import numpy as np
import pytest

from megappo.balance.layout import RankLayout
from megappo.balance.schedule import build_batch_schedule, rank_parts
from megappo.config.run import RunConfig
from megappo.controller.schedules import plan_for_layout
from megappo.planning.batch import step_batch

# data-parallel devices, layout, batching (prompts, samples, mini-batch prompts, cap), whether groups stay together.
CASES = [
    (1, {}, (8, 4, 4, 100), False),
    (4, {}, (6, 3, None, 64), False),
    (4, {"tensor": 2}, (5, 2, None, 40), False),
    (4, {"pipeline": 2}, (2, 2, 1, 1000), False),
    (4, {"pipeline": 2, "virtual_pipeline": 2}, (7, 3, None, 40), False),
    (4, {}, (6, 3, 3, 64), True),
    (2, {}, (3, 2, None, 10), False),
]


@pytest.mark.parametrize(("devices", "layout", "batching", "keeps_groups"), CASES)
def test_micro_batches_are_those_of_the_schedule_when_all_sequences_are_as_long_as_they_may_be(
    devices: int, layout: dict[str, int], batching: tuple[int, int, int | None, int], keeps_groups: bool
) -> None:
    config = RunConfig()
    config.cluster.pools = {"main": devices}
    for name, value in layout.items():
        setattr(config.actor.parallelism, name, value)
    prompts, samples, mini, cap = batching
    config.batching.prompts_per_step, config.batching.samples_per_prompt = prompts, samples
    config.batching.mini_batch_prompts, config.batching.micro_batch_tokens = mini, cap
    config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens = 5, 15
    config.algorithm.advantage.name = "optimal_token_baseline" if keeps_groups else "grpo"
    batch = step_batch(config)
    (role,) = batch.roles

    parallelism = config.actor.parallelism
    ranks = RankLayout(
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        data=devices // parallelism.model_size,
        virtual_pipeline=parallelism.virtual_pipeline or 1,
    )
    sequences = prompts * samples
    lengths = np.full(sequences, 20)
    schedule = build_batch_schedule(
        lengths,
        np.repeat(np.arange(prompts), samples),
        num_shards=ranks.data,
        num_mini_batches=config.batching.num_mini_batches,
        balance=True,
        keep_groups=keeps_groups,
    )
    assert batch.mini_batches == len(schedule.mini_batches)
    plans = [
        plan_for_layout(rank_parts(shards, ranks.data), lengths, layout=ranks, batching=config.batching)
        for shards in schedule.mini_batches
    ]
    assert role.micro_batches == max(len(plan[0]) for plan in plans)
    most = max(sum(len(part) for part in plan[rank]) for plan in plans for rank in range(ranks.data))
    assert role.sequences_per_rank == most
    assert role.sequences_per_micro_batch == max(len(part) for plan in plans for rank in plan for part in rank) or (
        role.sequences_per_micro_batch > most / role.micro_batches
    )
    whole = plan_for_layout(rank_parts(schedule.shards, ranks.data), lengths, layout=ranks, batching=config.batching)
    assert role.forward_micro_batches == len(whole[0])
    short = plan_for_layout(
        rank_parts(schedule.mini_batches[0], ranks.data), lengths // 20, layout=ranks, batching=config.batching
    )
    assert role.fewest_micro_batches <= len(short[0])


def test_steps_sequences_and_tokens_multiply() -> None:
    config = RunConfig()
    config.cluster.pools = {"main": 2}
    config.batching.prompts_per_step, config.batching.samples_per_prompt = 12, 5
    config.batching.mini_batch_prompts, config.batching.ppo_epochs = 4, 2
    config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens = 30, 70
    batch = step_batch(config)
    assert (batch.sequences, batch.mini_batches, batch.optimizer_steps) == (60, 3, 6)
    assert batch.sequences_per_mini_batch == 20 and batch.tokens_at_most == 6000 and batch.greedy_answers == 0


def test_roles_with_other_data_sizes_share_shards_of_the_least_common_multiple() -> None:
    config = RunConfig()
    config.algorithm.advantage.name = "gae"
    config.cluster.pools = {"main": 4, "other": 6}
    config.cluster.critic = "other"
    batch = step_batch(config)
    assert batch.shards == math.lcm(4, 6)
    assert any("12 shards" in reason for reason in batch.reasons)
    assert [(role.role, role.data_ranks) for role in batch.roles] == [("actor", 4), ("critic", 6)]


def test_what_is_rounded_is_said() -> None:
    config = RunConfig()
    config.cluster.pools = {"main": 4}
    config.actor.parallelism.pipeline = 2
    config.batching.prompts_per_step, config.batching.samples_per_prompt = 1, 3
    config.batching.micro_batch_tokens = 10
    config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens = 8, 8
    reasons = " ".join(step_batch(config).roles[0].reasons)
    assert "a sequence of 16 tokens is longer than batching.micro_batch_tokens=10" in reasons
    assert "3 sequences of a mini-batch do not divide over 2 data-parallel ranks: some have 2" in reasons
    assert "at least 4 micro-batches per mini-batch: 2 per stage of 2 stages" in reasons
    assert "2 of 4 micro-batches are empty" in reasons
