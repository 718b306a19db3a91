"""The maths between the passes and the update, once more, from what was recorded of the passes.

Shapes: N packed tokens, B sequences. Shard by shard, as the run did it.
"""

from dataclasses import dataclass

import numpy as np

from megappo.algo.advantages import compute_sequence_advantages, group_metrics, needs_sequence_advantages
from megappo.algo.experience import (
    ExperienceTotals,
    RewardTotals,
    build_experience,
    compute_token_rewards,
    merge_experience_metrics,
    merge_whitening,
)
from megappo.batch.fields import concat, select
from megappo.batch.requests import Whitening
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.algorithm_declarations import reads_sum_pi_squared
from megappo.controller.record_folder import StepRecord
from megappo.controller.rollouts import ScoredRollouts, sequence_inputs
from megappo.errors import RecordError
from megappo.observability.metrics import Metrics, merge


@dataclass(kw_only=True, slots=True, frozen=True)
class RebuiltExperience:
    """What came out."""

    token_rewards: TokenField
    experience: Experience
    whitening: Whitening | None
    metrics: Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class _Shard:
    """One shard of the record; sequences in the order of the run."""

    rows: np.ndarray
    """Positions in the record."""
    experience: Experience
    batch: RolloutBatch

    def field(self, values: np.ndarray | None) -> TokenField | None:
        """Return values [N] of the shard as a pass would have returned them."""
        if values is None:
            return None
        return TokenField(offsets=self.batch.offsets, values=values, sequence_ids=self.batch.sequence_ids)


def rebuild_experience(record: StepRecord, algorithm: AlgorithmConfig) -> RebuiltExperience:
    """Compute token rewards, advantages, returns and correction from recorded scores, log-probs and values.

    Raises:
        RecordError: the estimator reads what no record holds.
    """
    if reads_sum_pi_squared(algorithm):
        raise RecordError(
            f"algorithm.advantage.name={algorithm.advantage.name} reads the sum of squared probabilities of every "
            "token, which a record does not hold (replay --phase log_probs or update)"
        )
    scores = np.array([reward.score for reward in record.rewards], dtype=np.float64)
    truncated = np.array([info.finish_reason == "length" for info in record.sequences], dtype=np.bool_)
    shards = _shards_of(record)
    rewards = [_rewards(shard, scores, truncated, record, algorithm) for shard in shards]
    returns = np.empty_like(scores)
    for shard, (_, totals) in zip(shards, rewards):
        returns[shard.rows] = totals.returns
    inputs = sequence_inputs(
        ScoredRollouts(
            sequences=record.sequences, rewards=record.rewards, samples={}, greedy_scores=record.greedy_scores
        ),
        returns,
    )
    advantages = compute_sequence_advantages(inputs, algorithm) if needs_sequence_advantages(algorithm) else None
    built: list[tuple[Experience, ExperienceTotals]] = [
        build_experience(
            shard.batch,
            rewards=found,
            truncated=truncated[shard.rows],
            sequence_advantages=None if advantages is None else advantages[shard.rows],
            values=shard.field(shard.experience.values),
            old_log_probs=shard.field(shard.experience.old_log_probs),
            ref_log_probs=shard.field(shard.experience.ref_log_probs),
            algorithm=algorithm,
            current=record.current[shard.rows],
        )
        for shard, (found, _) in zip(shards, rewards)
    ]
    totals = [found for _, found in built]
    parts = [merge_experience_metrics(totals), group_metrics(inputs, algorithm)]
    return RebuiltExperience(
        token_rewards=concat([found for found, _ in rewards]),
        experience=concat([found for found, _ in built]),
        whitening=merge_whitening(totals),
        metrics=merge([*parts, *(found.metrics for _, found in rewards)]),
    )


def _shards_of(record: StepRecord) -> list[_Shard]:
    position = {key: index for index, key in enumerate(record.experience.sequence_ids.tolist())}
    shards: list[_Shard] = []
    for ids in record.shards:
        rows = np.array([position[key] for key in ids], dtype=np.int64)
        part = select(record.experience, rows)
        batch = RolloutBatch(
            offsets=part.offsets,
            tokens=part.tokens,
            response_mask=part.response_mask,
            rollout_log_probs=part.rollout_log_probs,
            sequence_ids=part.sequence_ids,
            group_ids=part.group_ids,
        )
        shards.append(_Shard(rows=rows, experience=part, batch=batch))
    return shards


def _rewards(
    shard: _Shard, scores: np.ndarray, truncated: np.ndarray, record: StepRecord, algorithm: AlgorithmConfig
) -> tuple[TokenField, RewardTotals]:
    return compute_token_rewards(
        shard.batch,
        scores=scores[shard.rows],
        truncated=truncated[shard.rows],
        old_log_probs=shard.field(shard.experience.old_log_probs),
        ref_log_probs=shard.field(shard.experience.ref_log_probs),
        algorithm=algorithm,
        kl_coef=record.kl_coef,
    )
