"""From token rewards to an Experience: advantages, returns, loss mask, correction weights.

Shapes: N packed tokens, B sequences. Order (each step sees the result of the one before): scores
placed, KL in reward, advantages, correction. Estimators of scope `sequence` have run on the controller by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megappo.algo.advantages import estimator_of, whitens_tokens
from megappo.algo.advantages.base import TokenInputs
from megappo.algo.correction import Correction, correct
from megappo.algo.diagnostics import MismatchSums, SequenceGaps, merge_mismatch
from megappo.algo.masked import Moments, count_tokens, merge_moments
from megappo.algo.scan import masked_moments
from megappo.algo.token_rewards import RewardTotals, compute_token_rewards
from megappo.batch.requests import Whitening
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import AlgorithmConfig, OldLogProbs
from megappo.observability import metrics
from megappo.observability.metrics import Metrics

__all__ = [
    "ExperienceTotals",
    "RewardTotals",
    "build_experience",
    "compute_token_rewards",
    "merge_experience_metrics",
    "merge_whitening",
]


@dataclass(kw_only=True, slots=True, frozen=True)
class ExperienceTotals:
    """Counts of one shard that the whole batch needs, in shard order."""

    loss_tokens: np.ndarray
    """[B] int64: tokens on the loss mask."""
    advantages: Moments
    """Of the advantages before whitening, over response tokens."""
    whitens: bool
    """Whether advantages are to be whitened over the global batch."""
    mismatch: MismatchSums
    """Of rollout and old log-probs, over response tokens."""
    gaps: SequenceGaps | None
    """Difference of rollout and old log-probs per sequence; None: no pass before the update gave old ones."""
    metrics: Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimates:
    """What is computed at the tokens of one shard."""

    advantages: np.ndarray
    """[N] before whitening."""
    returns: np.ndarray | None
    """[N]."""
    old_log_probs: np.ndarray | None
    """[N]."""
    loss_mask: np.ndarray
    """[N] bool."""
    correction_weights: np.ndarray | None
    """[N]."""
    totals: ExperienceTotals


def build_experience(  # noqa: PLR0913  one argument per pass that may have run before it
    batch: RolloutBatch,
    *,
    rewards: TokenField,
    truncated: np.ndarray,
    sequence_advantages: np.ndarray | None,
    values: TokenField | None,
    old_log_probs: TokenField | None,
    ref_log_probs: TokenField | None,
    algorithm: AlgorithmConfig,
    sum_pi_squared: TokenField | None = None,
    current: np.ndarray | None = None,
) -> tuple[Experience, ExperienceTotals]:
    """Compute advantages and returns of one shard, then apply the rollout correction.

    Args:
        rewards: from `compute_token_rewards`.
        truncated: [B] bool, True where the response ended by length.
        sequence_advantages: [B] float64, from `compute_sequence_advantages`, for estimators that have that stage.
        values: for estimators that need a critic.
        old_log_probs: None when the update's own log-probs stand for them; with `old_log_probs: rollout` the engine's
            are taken instead.
        sum_pi_squared: for optimal_token_baseline, which also needs whole groups on the shard.
        current: [B] bool, whether the current weights sampled the whole response; None: all are. Only these tell how
            far the rollout engine is from the training engine.

    Raises:
        AlgorithmInputError: correction is on and a sequence lacks rollout log-probs (NaN on the mask).
    """
    inputs = TokenInputs(
        mask=batch.response_mask,
        offsets=batch.offsets,
        rewards=rewards.values,
        group_ids=batch.group_ids,
        sequence_advantages=sequence_advantages,
        values=_values_of(values),
        old_log_probs=_values_of(old_log_probs),
        sum_pi_squared=_values_of(sum_pi_squared),
    )
    estimates = estimate(batch, inputs, truncated=truncated, algorithm=algorithm, current=current)
    experience = Experience(
        offsets=batch.offsets,
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        rollout_log_probs=batch.rollout_log_probs,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        loss_mask=estimates.loss_mask,
        advantages=estimates.advantages,
        old_log_probs=estimates.old_log_probs,
        ref_log_probs=_values_of(ref_log_probs),
        values=_values_of(values),
        returns=estimates.returns,
        correction_weights=estimates.correction_weights,
    )
    return experience, estimates.totals


def _values_of(field: TokenField | None) -> np.ndarray | None:
    return None if field is None else field.values


def correct_and_truncate(
    batch: RolloutBatch,
    old_log_probs: np.ndarray | None,
    *,
    truncated: np.ndarray,
    algorithm: AlgorithmConfig,
    current: np.ndarray | None = None,
) -> Correction:
    """Return `correct` with its loss mask as the loss takes it: without truncated sequences where they are masked; its
    metrics say which share of the response tokens that leaves."""
    corrected = correct(batch, old_log_probs, algorithm, current=current)
    if algorithm.mask_truncated:
        corrected.loss_mask &= np.repeat(~truncated, batch.lengths)
    kept, sampled = int(np.count_nonzero(corrected.loss_mask)), int(np.count_nonzero(batch.response_mask))
    corrected.metrics["actor/loss_token_ratio"] = metrics.mean(kept, sampled)
    return corrected


def estimate(
    batch: RolloutBatch,
    inputs: TokenInputs,
    *,
    truncated: np.ndarray,
    algorithm: AlgorithmConfig,
    current: np.ndarray | None = None,
) -> Estimates:
    """Return all that `build_experience` computes, in the precision of the inputs."""
    if algorithm.old_log_probs is OldLogProbs.rollout:
        # An engine reports numbers for prompt tokens, too.
        rollout = np.where(batch.response_mask, batch.rollout_log_probs, np.float32(0))
        inputs = replace(inputs, old_log_probs=rollout)
    corrected = correct_and_truncate(
        batch, inputs.old_log_probs, truncated=truncated, algorithm=algorithm, current=current
    )
    estimated = estimator_of(algorithm).token_stage(inputs, algorithm.advantage)
    loss_mask = corrected.loss_mask
    loss_tokens = count_tokens(loss_mask, batch.offsets)
    moments, largest, smallest = masked_moments(estimated.advantages, inputs.mask)
    counts = {
        **corrected.metrics,
        "actor/advantages/mean": metrics.mean(moments.mean * moments.count, moments.count),
        "actor/advantages/max": metrics.maximum(largest, moments.count),
        "actor/advantages/min": metrics.minimum(smallest, moments.count),
    }
    if estimated.returns is not None:
        counts["critic/returns/mean"] = metrics.mean(estimated.returns.sum(dtype=np.float64), moments.count)
    totals = ExperienceTotals(
        loss_tokens=loss_tokens,
        advantages=moments,
        whitens=whitens_tokens(algorithm),
        mismatch=corrected.mismatch,
        gaps=corrected.gaps,
        metrics=counts,
    )
    return Estimates(
        advantages=estimated.advantages,
        returns=estimated.returns,
        old_log_probs=inputs.old_log_probs,
        loss_mask=loss_mask,
        correction_weights=corrected.weights,
        totals=totals,
    )


def merge_whitening(totals: Sequence[ExperienceTotals]) -> Whitening | None:
    """Whitening of the advantages over the response tokens of all shards; None when the estimator does not whiten,
    or when there are fewer than two tokens (advantages then stay as they are)."""
    if not all(part.whitens for part in totals):
        return None
    return merge_moments(part.advantages for part in totals).whitening


def merge_experience_metrics(totals: Sequence[ExperienceTotals]) -> Metrics:
    """Metrics of all shards together; `actor/whitening_skipped` is 1 when there were too few tokens to whiten."""
    merged = metrics.merge(part.metrics for part in totals)
    merged.update(merge_mismatch(part.mismatch for part in totals))
    if any(part.whitens for part in totals):
        merged["actor/whitening_skipped"] = metrics.total(float(merge_whitening(totals) is None))
    return merged
