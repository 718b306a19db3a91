"""How far the rollout engine is from the training engine.

Shapes: M response tokens. d = rollout log-prob - old log-prob. Tokens without a rollout log-prob are left
out by the caller.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megappo.algo.kl import EXPONENT_LIMIT
from megappo.observability import metrics
from megappo.observability.metrics import Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class MismatchSums:
    """Sums over response tokens from which the metrics of the whole batch follow, whatever the sharding."""

    count: float = 0.0
    rollout_mean: float = 0.0
    """Mean rollout probability of the sampled tokens."""
    old_mean: float = 0.0
    rollout_m2: float = 0.0
    """Squared deviations from rollout_mean."""
    old_m2: float = 0.0
    co_moment: float = 0.0
    """Products of both deviations."""
    log_ratio: float = 0.0
    """Sum of d."""
    weight: float = 0.0
    """Sum of the bounded importance weights."""
    weight_squared: float = 0.0

    def merge(self, other: "MismatchSums") -> "MismatchSums":
        """Sums of both samples together (moments as in Chan et al. 1979)."""
        if self.count == 0 or other.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        factor = self.count * other.count / count
        rollout, old = other.rollout_mean - self.rollout_mean, other.old_mean - self.old_mean
        return MismatchSums(
            count=count,
            rollout_mean=self.rollout_mean + rollout * other.count / count,
            old_mean=self.old_mean + old * other.count / count,
            rollout_m2=self.rollout_m2 + other.rollout_m2 + rollout * rollout * factor,
            old_m2=self.old_m2 + other.old_m2 + old * old * factor,
            co_moment=self.co_moment + other.co_moment + rollout * old * factor,
            log_ratio=self.log_ratio + other.log_ratio,
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
        )


def compare_log_probs(rollout: np.ndarray, old: np.ndarray, weights: np.ndarray | None) -> tuple[Metrics, MismatchSums]:
    """Compare the rollout engine's log-probs [M] with the training engine's [M]; all means are over response tokens.

    `correction/k3` estimates KL(rollout || old), `correction/chi2` mean((p_old / p_rollout)^2) - 1.

    Args:
        weights: [M] bounded importance weights, for their sums.
    """
    count, d = len(rollout), rollout - old
    rollout_probs, old_probs = np.exp(rollout), np.exp(old)
    gap = np.abs(rollout_probs - old_probs)
    clamped = np.clip(d, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    ratio_less_1 = np.expm1(-clamped)
    log_ratio, size = d.sum(), np.abs(d, out=d)
    found: Metrics = {
        "actor/rollout_log_prob_diff/max": metrics.maximum(size.max(initial=0.0), count),
        "actor/rollout_log_prob_diff/mean": metrics.mean(size.sum(), count),
        "correction/probability_diff/mean": metrics.mean(gap.sum(), count),
        "correction/probability_diff/max": metrics.maximum(gap.max(initial=0.0), count),
        "correction/k3": metrics.mean((ratio_less_1 + clamped).sum(), count),
        # ratio^2 - 1 = (ratio - 1)^2 + 2 (ratio - 1), without loss where the ratio is close to 1
        "correction/chi2": metrics.mean(ratio_less_1 @ ratio_less_1 + 2.0 * ratio_less_1.sum(), count),
    }
    if not count:
        return found, MismatchSums()
    rollout_mean, old_mean = rollout_probs.mean(), old_probs.mean()
    # The probabilities become their deviations.
    rollout_probs -= rollout_mean
    old_probs -= old_mean
    return found, MismatchSums(
        count=float(count),
        rollout_mean=float(rollout_mean),
        old_mean=float(old_mean),
        rollout_m2=float(rollout_probs @ rollout_probs),
        old_m2=float(old_probs @ old_probs),
        co_moment=float(rollout_probs @ old_probs),
        log_ratio=float(log_ratio),
        weight=0.0 if weights is None else float(weights.sum()),
        weight_squared=0.0 if weights is None else float(weights @ weights),
    )


def merge_mismatch(parts: Iterable[MismatchSums]) -> Metrics:
    """Metrics of the whole batch, over its response tokens: Pearson r of rollout and old probabilities, perplexity of
    the old policy over that of the rollout engine, effective sample size (sum w)^2 / sum w^2 as a share of tokens."""
    sums = MismatchSums()
    for part in parts:
        sums = sums.merge(part)
    if sums.count == 0:
        return {}
    merged = {"correction/perplexity_ratio": metrics.mean(math.exp(min(sums.log_ratio / sums.count, 700.0)), 1)}
    if sums.rollout_m2 > 0 and sums.old_m2 > 0:
        pearson = sums.co_moment / math.sqrt(sums.rollout_m2) / math.sqrt(sums.old_m2)
        merged["correction/probability_pearson_r"] = metrics.mean(pearson, 1)
    if sums.weight_squared > 0:
        share = sums.weight * sums.weight / sums.weight_squared / sums.count
        merged["correction/effective_sample_share"] = metrics.mean(share, 1)
    return merged
