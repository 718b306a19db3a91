"""Correction of the difference between rollout and training engine: importance weights, rejection, metrics.

Shapes: N packed tokens, M response tokens, B sequences. d = rollout log-prob - old log-prob.
Everything is detached numbers; rewards are placed before, so rejecting the last token never loses one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megappo.algo.diagnostics import MismatchSums, SequenceGaps, compare_log_probs
from megappo.algo.errors import AlgorithmInputError
from megappo.algo.kl import EXPONENT_LIMIT
from megappo.algo.masked import MaskedTokens, compact, sequence_runs
from megappo.batch.stages import RolloutBatch
from megappo.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionMode,
    CorrectionWeightConfig,
    OldLogProbs,
    RejectConfig,
    RejectEstimator,
    RejectLevel,
)
from megappo.observability import metrics
from megappo.observability.metrics import Metrics


def _exp(exponent: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT))


_ESTIMATORS: dict[RejectEstimator, Callable[[np.ndarray], np.ndarray]] = {
    RejectEstimator.ratio: lambda d: _exp(-d),
    RejectEstimator.k1: lambda d: d,
    RejectEstimator.k2: lambda d: 0.5 * np.square(d),
    RejectEstimator.k3: lambda d: _exp(-d) - 1.0 + d,
}


def compute_weights(
    d: np.ndarray, tokens: MaskedTokens, config: CorrectionWeightConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Importance weight of each response token.

    Formula: w = exp(clamp(-d, -20, 20)) per token, or of the sum of -d over the response tokens of the sequence.
        truncate: min(w, high). mask: 0 outside [low, high]; denominators stay.
    Source: truncate: Yao et al. 2025, truncated importance sampling (https://fengyao.notion.site/off-policy-rl);
        mask: Ling Team 2025, IcePop, arXiv:2510.18855.
    Config: correction.weight.level, .mode, .low, .high.
    Use: rollout engine and trainer disagree (other kernels, precision, an older policy).

    Returns:
        Bounded weights [M]; where they were bounded [M] bool.
    """
    exponent = -d if config.level is CorrectionLevel.token else tokens.sums(-d)[tokens.sequence]
    raw = _exp(exponent)
    if config.mode is CorrectionMode.truncate:
        return np.minimum(raw, config.high), raw > config.high
    outside = (raw < config.low) | (raw > config.high)
    return np.where(outside, 0.0, raw), outside


def compute_kept(d: np.ndarray, tokens: MaskedTokens, rejections: list[RejectConfig]) -> np.ndarray:
    """Where a response token survives every rejection, [M] bool.

    Formula: x = ratio exp(-d), k1 d, k2 d^2/2 or k3 exp(-d) - 1 + d of a token, or their sum, mean or maximum over
        the response tokens of the sequence; x outside [low, high] removes the token (the sequence) from the loss
        mask and from every denominator. Each rejection looks at all response tokens, whatever others remove.
    Source: Liu et al. 2025 (https://richardli.xyz/rl-collapse); masked importance sampling as in IcePop,
        arXiv:2510.18855.
    Config: correction.reject, a list of {level, estimator, low, high}.
    Use: to leave out what the rollout engine sampled from a visibly different policy.
    """
    kept = np.ones(len(d), dtype=bool)
    for rejection in rejections:
        x = _ESTIMATORS[rejection.estimator](d)
        if rejection.level is not RejectLevel.token:
            x = _per_sequence(x, tokens, rejection.level)[tokens.sequence]
        kept &= ~((x < rejection.low) | (x > rejection.high))
    return kept


def _per_sequence(x: np.ndarray, tokens: MaskedTokens, level: RejectLevel) -> np.ndarray:
    """Return the sum, mean or maximum of x [M] per sequence [B]; empty sequences have any value."""
    if level is RejectLevel.sequence_sum:
        return tokens.sums(x)
    if level is RejectLevel.sequence_mean:
        return tokens.means(x)
    largest = np.full(len(tokens.lengths), -np.inf)
    np.maximum.at(largest, tokens.sequence, x)
    return largest


@dataclass(kw_only=True, slots=True)
class Correction:
    """What the comparison of rollout and old log-probs leaves of a shard."""

    loss_mask: np.ndarray
    """[N] bool: the response mask after rejection."""
    weights: np.ndarray | None
    """[N] importance weights, 0 off the response mask; None: all 1."""
    gaps: SequenceGaps | None
    """Per sequence; None: there is no second log-prob to compare with."""
    metrics: Metrics
    mismatch: MismatchSums


def correct(
    batch: RolloutBatch,
    old_log_probs: np.ndarray | None,
    algorithm: AlgorithmConfig,
    *,
    current: np.ndarray | None = None,
) -> Correction:
    """Compare the log-probs of both engines, reject and weigh. Runs of sequences keep the float64 copies small.

    Args:
        old_log_probs: [N]; None: the update's own stand for them, so there is nothing to compare. Nor is there where
            they are the rollout log-probs themselves.
        current: [B] bool, whether the current weights sampled the whole response; None: all are.

    Raises:
        AlgorithmInputError: rollout log-probs are needed and a sequence lacks one (NaN on the mask).
    """
    result = Correction(
        loss_mask=batch.response_mask.copy(), weights=None, gaps=None, metrics=Metrics(), mismatch=MismatchSums()
    )
    if old_log_probs is None:
        assert not algorithm.correction.is_on, "correction needs old log-probs"
        return result
    if algorithm.old_log_probs is not OldLogProbs.rollout:
        result.gaps = SequenceGaps.zeros(batch.num_sequences)
    for first, last in sequence_runs(batch.offsets):
        run = slice(batch.offsets[first], batch.offsets[last])
        tokens = compact(batch.response_mask[run], batch.offsets[first : last + 1] - run.start)
        rollout = tokens.gather(batch.rollout_log_probs[run])
        _refuse_missing(rollout, tokens, batch.sequence_ids[first:last], algorithm)
        if result.gaps is None:
            continue
        old = tokens.gather(old_log_probs[run])
        compared = _compared(rollout, tokens, None if current is None else current[first:last])
        result.gaps.measure(slice(first, last), rollout - old, tokens, compared)
        kept, weights, counts, mismatch = _correct_run(rollout, old, tokens, algorithm.correction, compared)
        if kept is not None:
            result.loss_mask[run][tokens.index] = kept
        if weights is not None:
            if result.weights is None:
                result.weights = batch.response_mask.astype(old_log_probs.dtype)
            result.weights[run][tokens.index] = weights
        result.metrics = metrics.merge([result.metrics, counts])
        result.mismatch = result.mismatch.merge(mismatch)
    if result.gaps is not None:
        result.metrics |= result.gaps.metrics(int(np.count_nonzero(batch.response_mask)))
    return result


def _compared(rollout: np.ndarray, tokens: MaskedTokens, current: np.ndarray | None) -> np.ndarray | None:
    """Return which tokens [M] the engine reported and, with `current` [B], the current weights sampled; None: all."""
    compared = ~np.isnan(rollout)
    if current is not None and not current.all():
        compared &= current[tokens.sequence]
    return None if compared.all() else compared


def _refuse_missing(
    rollout: np.ndarray, tokens: MaskedTokens, sequence_ids: np.ndarray, algorithm: AlgorithmConfig
) -> None:
    """Raise AlgorithmInputError for the first sequence with a NaN among its rollout log-probs [M], if they count."""
    if algorithm.old_log_probs is OldLogProbs.rollout:
        why = "old_log_probs=rollout needs it (use recompute)"
    elif algorithm.correction.is_on:
        why = "rollout correction needs it (turn correction off)"
    else:
        return
    missing = np.isnan(rollout)
    if missing.any():
        row = tokens.sequence[missing.argmax()]
        raise AlgorithmInputError(int(sequence_ids[row]), "rollout_log_probs", f"is missing, {why}")


def _correct_run(
    rollout: np.ndarray,
    old: np.ndarray,
    tokens: MaskedTokens,
    config: CorrectionConfig,
    compared: np.ndarray | None,
) -> tuple[np.ndarray | None, np.ndarray | None, Metrics, MismatchSums]:
    """Return kept tokens [M] bool (None: all), importance weights [M] (None: all 1), metrics and sums."""
    counts = Metrics()
    kept = weights = None
    if config.is_on:
        kept, weights = _reject_and_weigh(rollout - old, tokens, config, counts)
    known = ~np.isnan(rollout)
    if compared is not None and not known.all():
        rollout, old, compared = rollout[known], old[known], compared[known]
    found, mismatch = compare_log_probs(rollout, old, weights, compared=compared)
    return kept, weights, counts | found, mismatch


def _reject_and_weigh(
    d: np.ndarray, tokens: MaskedTokens, config: CorrectionConfig, counts: Metrics
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return kept tokens [M] bool and importance weights [M] of d [M]; adds to `counts`."""
    kept = weights = None
    if config.reject:
        kept = compute_kept(d, tokens, config.reject)
        counts["correction/kept_fraction"] = metrics.mean(kept.sum(), len(kept))
    if config.weight is not None:
        weights, bounded = compute_weights(d, tokens, config.weight)
        counts["correction/weight/mean"] = metrics.mean(weights.sum(), len(weights))
        counts["correction/weight/max"] = metrics.maximum(weights.max(initial=0.0), len(weights))
        counts["correction/capped_fraction"] = metrics.mean(bounded.sum(), len(weights))
    finite = np.isfinite(d)
    if not finite.all():
        # An infinite log-prob must reach the loss, not vanish in a bound: the step is then reported as not finite.
        weights = np.where(finite, 1.0 if weights is None else weights, np.nan)
        kept = None if kept is None else kept | ~finite
    return kept, weights
