"""From token rewards to an Experience: advantages, returns, loss mask, correction weights.

Shapes: N packed tokens, M response tokens, B sequences. Order (each step sees the result of the one before): scores
placed, KL in reward, advantages, correction. Estimators of scope `sequence` have run on the controller by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megappo.algo.advantages import estimator_of, whitens_tokens
from megappo.algo.advantages.base import TokenInputs
from megappo.algo.correction import compute_kept, compute_weights
from megappo.algo.diagnostics import MismatchSums, compare_log_probs, merge_mismatch
from megappo.algo.errors import AlgorithmInputError
from megappo.algo.masked import MaskedTokens, Moments, compact, merge_moments
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
    metrics: Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimates:
    """What is computed at the response tokens of one shard, in float64."""

    tokens: MaskedTokens
    advantages: np.ndarray
    """[M] before whitening."""
    returns: np.ndarray | None
    """[M]."""
    old_log_probs: np.ndarray | None
    """[M]."""
    loss_mask: np.ndarray
    """[M] bool."""
    correction_weights: np.ndarray | None
    """[M]."""
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

    Raises:
        AlgorithmInputError: correction is on and a sequence lacks rollout log-probs (NaN on the mask).
    """
    tokens = compact(batch.response_mask, batch.offsets)
    inputs = TokenInputs(
        tokens=tokens,
        rewards=tokens.gather(rewards.values),
        group_ids=batch.group_ids,
        sequence_advantages=sequence_advantages,
        values=None if values is None else tokens.gather(values.values),
        old_log_probs=None if old_log_probs is None else tokens.gather(old_log_probs.values),
        sum_pi_squared=None if sum_pi_squared is None else tokens.gather(sum_pi_squared.values),
    )
    estimates = estimate(batch, inputs, truncated=truncated, algorithm=algorithm)
    experience = Experience(
        offsets=batch.offsets,
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        rollout_log_probs=batch.rollout_log_probs,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        loss_mask=tokens.scatter(estimates.loss_mask, dtype=np.bool_),
        advantages=tokens.scatter(estimates.advantages),
        old_log_probs=_scatter(tokens, estimates.old_log_probs),
        ref_log_probs=None if ref_log_probs is None else ref_log_probs.values,
        values=None if values is None else values.values,
        returns=_scatter(tokens, estimates.returns),
        correction_weights=_scatter(tokens, estimates.correction_weights),
    )
    return experience, estimates.totals


def _scatter(tokens: MaskedTokens, values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else tokens.scatter(values)


def estimate(
    batch: RolloutBatch, inputs: TokenInputs, *, truncated: np.ndarray, algorithm: AlgorithmConfig
) -> Estimates:
    """Return all that `build_experience` computes, in float64 and at the response tokens only."""
    tokens, rollout = inputs.tokens, inputs.tokens.gather(batch.rollout_log_probs)
    missing = np.isnan(rollout)
    if algorithm.old_log_probs is OldLogProbs.rollout:
        _refuse_missing(batch, tokens, missing, "old_log_probs=rollout needs it (use recompute)")
        inputs = replace(inputs, old_log_probs=rollout)
    if algorithm.correction.is_on:
        _refuse_missing(batch, tokens, missing, "rollout correction needs it (turn correction off)")
    estimated = estimator_of(algorithm).token_stage(inputs, algorithm.advantage)
    loss_mask, weights, counts, mismatch = _correct(rollout, inputs.old_log_probs, tokens, algorithm)
    if algorithm.mask_truncated:
        loss_mask &= ~truncated[tokens.sequence]
    moments = Moments.of(estimated.advantages)
    counts["actor/advantages/mean"] = metrics.mean(estimated.advantages.sum(), moments.count)
    counts["actor/advantages/max"] = metrics.maximum(estimated.advantages.max(initial=-np.inf), moments.count)
    counts["actor/advantages/min"] = metrics.minimum(estimated.advantages.min(initial=np.inf), moments.count)
    counts["actor/loss_token_ratio"] = metrics.mean(loss_mask.sum(), moments.count)
    if estimated.returns is not None:
        counts["critic/returns/mean"] = metrics.mean(estimated.returns.sum(), moments.count)
    totals = ExperienceTotals(
        loss_tokens=tokens.sums(loss_mask).astype(np.int64),
        advantages=moments,
        whitens=whitens_tokens(algorithm),
        mismatch=mismatch,
        metrics=counts,
    )
    return Estimates(
        tokens=tokens,
        advantages=estimated.advantages,
        returns=estimated.returns,
        old_log_probs=inputs.old_log_probs,
        loss_mask=loss_mask,
        correction_weights=weights,
        totals=totals,
    )


def _refuse_missing(batch: RolloutBatch, tokens: MaskedTokens, missing: np.ndarray, why: str) -> None:
    """Raise AlgorithmInputError for the first sequence with a response token that is `missing` [M] bool."""
    if missing.any():
        row = int(tokens.sequence[missing.argmax()])
        raise AlgorithmInputError(int(batch.sequence_ids[row]), "rollout_log_probs", f"is missing, {why}")


def _correct(
    rollout: np.ndarray, old: np.ndarray | None, tokens: MaskedTokens, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, np.ndarray | None, Metrics, MismatchSums]:
    """Return kept tokens [M] bool, importance weights [M], metrics and sums of the rollout correction."""
    config, counts = algorithm.correction, Metrics()
    kept = np.ones(len(rollout), dtype=bool)
    if old is None:
        assert not config.is_on, "correction needs old log-probs"
        return kept, None, counts, MismatchSums()
    weights, d, known = None, rollout - old, ~np.isnan(rollout)
    if config.reject:
        kept = compute_kept(d, tokens, config.reject)
        counts["correction/kept_fraction"] = metrics.mean(kept.sum(), len(kept))
    if config.weight is not None:
        weights, bounded = compute_weights(d, tokens, config.weight)
        counts["correction/weight/mean"] = metrics.mean(weights.sum(), len(weights))
        counts["correction/weight/max"] = metrics.maximum(weights.max(initial=0.0), len(weights))
        counts["correction/capped_fraction"] = metrics.mean(bounded.sum(), len(weights))
    if known.any():
        counts |= compare_log_probs(rollout[known], old[known])
    mismatch = MismatchSums.of(rollout[known], old[known], weights)
    if config.is_on and not np.isfinite(d).all():
        # An infinite log-prob must reach the loss, not vanish in a bound: the step is then reported as not finite.
        weights = np.where(np.isfinite(d), 1.0 if weights is None else weights, np.nan)
        kept |= ~np.isfinite(d)
    return kept, weights, counts, mismatch


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
