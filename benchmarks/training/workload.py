"""Synthetic sequences of a training step and who computes what, by the scheduler that a run uses.

Shapes: B sequences of the step. Every process makes the same work from the same seed.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megappo.balance.layout import RankLayout
from megappo.balance.schedule import build_batch_schedule
from megappo.balance.workload import workload_of_model
from megappo.batch.fields import concat, offsets_of, select
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch
from megappo.config.algorithm import Aggregation
from megappo.config.run import RunConfig
from megappo.controller.schedules import StepSchedule


@dataclass(kw_only=True, slots=True, frozen=True)
class LengthDistribution:
    """Log-normal lengths, cut off at both ends."""

    mean: float
    """Mean tokens of a sequence before the cut, prompt included."""
    spread: float
    """Standard deviation of the logarithm; 0: all sequences are equally long."""
    longest: int
    prompt_share: float
    """Share of a sequence that is prompt, 0 to 1."""

    def draw(self, count: int, *, seed: int) -> np.ndarray:
        """Return [count] int64 lengths of at least 2 tokens."""
        normal = np.random.default_rng(seed).normal(size=count)
        lengths = self.mean * np.exp(self.spread * normal - self.spread**2 / 2)
        return np.clip(np.rint(lengths), 2, self.longest).astype(np.int64)

    def prompts(self, lengths: np.ndarray) -> np.ndarray:
        """Return the prompt tokens of each sequence: at least 1, and at least 1 less than there are tokens."""
        return np.clip(np.rint(lengths * self.prompt_share), 1, lengths - 1).astype(np.int64)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingWork:
    """The sequences of a step, and the plan of its forward pass and its update."""

    experience: Experience
    """All sequences; a data-parallel rank takes those of its shard."""
    shards: list[list[int]]
    """[data rank] -> sequence ids."""
    plan: list[list[list[int]]]
    """[data rank][micro-batch] -> sequence ids, of the forward pass."""
    requests: list[UpdateRequest]
    """[data rank]."""

    @property
    def micro_batches(self) -> float:
        """Micro-batches of an optimizer step, mean over the optimizer steps."""
        return float(np.mean([len(mini_batch.micro_batches) for mini_batch in self.requests[0].mini_batches]))

    def shard(self, data_rank: int) -> Experience:
        """Return the sequences of a data-parallel rank; their ids are their positions."""
        return select(self.experience, np.asarray(self.shards[data_rank], dtype=np.int64))


def make_work(
    config: RunConfig, model: dict[str, Any], layout: RankLayout, lengths: LengthDistribution
) -> TrainingWork:  # Any: a config.json
    """Draw the sequences of a step (`batching.prompts_per_step` times `samples_per_prompt`) and schedule them."""
    batching, count = config.batching, config.batching.sequences_per_step
    tokens = lengths.draw(count, seed=config.seed)
    ids = np.arange(count, dtype=np.int64)
    groups = ids // batching.samples_per_prompt
    cost = workload_of_model(model)
    schedule = StepSchedule(
        batch=build_batch_schedule(
            tokens,
            groups,
            num_shards=layout.data,
            num_mini_batches=batching.num_mini_batches,
            balance=batching.balance,
            keep_groups=False,
            cost=cost,
        ),
        sequence_ids=ids,
        group_ids=groups,
        lengths=tokens,
        batching=batching,
        workload=cost,
    )
    experience = _experience(tokens, lengths.prompts(tokens), groups, vocab_size=model["vocab_size"], seed=config.seed)
    requests = schedule.update_requests(
        layout,
        loss_tokens=tokens - lengths.prompts(tokens),
        aggregation=Aggregation.token_mean,
        constant_length=None,
        whitening=None,
    )
    return TrainingWork(
        experience=experience, shards=schedule.shard_ids(), plan=schedule.plan_pass(layout), requests=requests
    )


def _experience(
    lengths: np.ndarray, prompts: np.ndarray, groups: np.ndarray, *, vocab_size: int, seed: int
) -> Experience:
    """Random tokens with the log-probs of a uniform policy, which a model with random weights is close to."""
    random = np.random.default_rng(seed)
    responses = np.concatenate([np.arange(length) >= prompt for length, prompt in zip(lengths, prompts)])
    log_probs = np.where(responses, -np.log(vocab_size), 0).astype(np.float32)
    return Experience(
        offsets=offsets_of(lengths),
        tokens=random.integers(0, vocab_size, len(responses)).astype(np.int32),
        response_mask=responses,
        rollout_log_probs=log_probs,
        sequence_ids=np.arange(len(lengths), dtype=np.int64),
        group_ids=groups,
        loss_mask=responses,
        advantages=np.where(responses, random.normal(size=len(responses)), 0).astype(np.float32),
        old_log_probs=log_probs,
    )


def rollouts_of(experience: Experience) -> RolloutBatch:
    """Return the sampled part of the experience."""
    return RolloutBatch(
        offsets=experience.offsets,
        tokens=experience.tokens,
        response_mask=experience.response_mask,
        rollout_log_probs=experience.rollout_log_probs,
        sequence_ids=experience.sequence_ids,
        group_ids=experience.group_ids,
    )


def doubled(work: TrainingWork) -> TrainingWork:
    """Return the same work with every micro-batch twice, in as many optimizer steps."""
    count = work.experience.num_sequences
    again = replace(work.experience, sequence_ids=work.experience.sequence_ids + count)

    def twice(micro_batches: list[list[int]]) -> list[list[int]]:
        return [*micro_batches, *([sequence + count for sequence in ids] for ids in micro_batches)]

    def double(mini_batch: MiniBatch) -> MiniBatch:
        weights = mini_batch.loss_weights
        return MiniBatch(
            micro_batches=twice(mini_batch.micro_batches),
            loss_weights=weights | {sequence + count: weight for sequence, weight in weights.items()},
        )

    return TrainingWork(
        experience=concat([work.experience, again]),
        shards=[[*ids, *(sequence + count for sequence in ids)] for ids in work.shards],
        plan=[twice(micro_batches) for micro_batches in work.plan],
        requests=[
            replace(request, mini_batches=[double(mini_batch) for mini_batch in request.mini_batches])
            for request in work.requests
        ],
    )
