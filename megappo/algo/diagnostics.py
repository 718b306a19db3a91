"""How far the rollout engine is from the training engine.

Shapes: B sequences, M response tokens. d = rollout log-prob - old log-prob. Tokens without a rollout log-prob are left
out by the caller. Compared tokens are those of sequences that the current weights sampled as a whole: what an older
version sampled differs also by how far the policy has moved since.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from megappo.algo.kl import EXPONENT_LIMIT
from megappo.algo.masked import MaskedTokens
from megappo.observability import metrics
from megappo.observability.metrics import Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class SequenceGaps:
    """|d| of every sequence over its compared tokens; each is 0 where nothing was compared."""

    tokens: np.ndarray
    """[B] int64: compared tokens."""
    total: np.ndarray
    """[B] float64: sum of |d|."""
    largest: np.ndarray
    """[B] float64."""

    @classmethod
    def zeros(cls, num_sequences: int) -> "SequenceGaps":
        """Return gaps of sequences of which nothing is compared yet."""
        return cls(
            tokens=np.zeros(num_sequences, np.int64),
            total=np.zeros(num_sequences),
            largest=np.zeros(num_sequences),
        )

    def measure(self, run: slice, d: np.ndarray, tokens: MaskedTokens, compared: np.ndarray | None) -> None:
        """Fill in the sequences of a run.

        Args:
            d: [M] of the run's tokens; it is overwritten.
            compared: [M] bool; None: all.
        """
        if not len(d):
            return
        size = np.abs(d, out=d)
        if compared is not None:
            size = np.where(compared, size, 0.0)
        self.tokens[run] = tokens.lengths if compared is None else tokens.sums(compared)
        self.total[run] = tokens.sums(size)
        occupied = tokens.lengths > 0
        starts: np.ndarray = tokens.offsets[:-1][occupied]
        self.largest[run][occupied] = np.maximum.reduceat(size, starts)

    def metrics(self, response_tokens: int) -> Metrics:
        """Mean and maximum over the compared tokens, and their share of the response tokens."""
        count = int(self.tokens.sum())
        return {
            "actor/rollout_log_prob_diff/max": metrics.maximum(self.largest.max(initial=0.0), count),
            "actor/rollout_log_prob_diff/mean": metrics.mean(self.total.sum(), count),
            "actor/rollout_log_prob_diff/compared_ratio": metrics.mean(count, response_tokens),
        }


@dataclass(kw_only=True, slots=True, frozen=True)
class PairMoments:
    """Moments of the probabilities that both engines give to the same tokens; they merge without loss of precision
    (Chan et al. 1979), so the correlation does not depend on how the tokens were cut."""

    count: float = 0.0
    rollout_mean: float = 0.0
    old_mean: float = 0.0
    rollout_m2: float = 0.0
    """Squared deviations from rollout_mean."""
    old_m2: float = 0.0
    co_moment: float = 0.0
    """Products of both deviations."""

    @classmethod
    def of(cls, rollout: np.ndarray, old: np.ndarray) -> "PairMoments":
        """Two-pass moments of two float64 arrays of equal length; both are overwritten."""
        if not len(rollout):
            return cls()
        rollout_mean, old_mean = rollout.mean(), old.mean()
        rollout -= rollout_mean
        old -= old_mean
        return cls(
            count=float(len(rollout)),
            rollout_mean=float(rollout_mean),
            old_mean=float(old_mean),
            rollout_m2=float(rollout @ rollout),
            old_m2=float(old @ old),
            co_moment=float(rollout @ old),
        )

    def merge(self, other: "PairMoments") -> "PairMoments":
        """Moments of both samples together."""
        if self.count == 0 or other.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        factor = self.count * other.count / count
        rollout, old = other.rollout_mean - self.rollout_mean, other.old_mean - self.old_mean
        return PairMoments(
            count=count,
            rollout_mean=self.rollout_mean + rollout * other.count / count,
            old_mean=self.old_mean + old * other.count / count,
            rollout_m2=self.rollout_m2 + other.rollout_m2 + rollout * rollout * factor,
            old_m2=self.old_m2 + other.old_m2 + old * old * factor,
            co_moment=self.co_moment + other.co_moment + rollout * old * factor,
        )

    @property
    def pearson_r(self) -> float | None:
        """Correlation of the two; None where one of them has no spread."""
        if not (self.rollout_m2 > 0 and self.old_m2 > 0):
            return None
        return self.co_moment / math.sqrt(self.rollout_m2) / math.sqrt(self.old_m2)


@dataclass(kw_only=True, slots=True, frozen=True)
class MismatchSums:
    """Sums from which the metrics of the whole batch follow, whatever the sharding."""

    count: float = 0.0
    log_ratio: float = 0.0
    """Sum of d."""
    weight: float = 0.0
    """Sum of the bounded importance weights."""
    weight_squared: float = 0.0
    pairs: PairMoments = field(default_factory=PairMoments)
    """Of the compared tokens; the sums above are over all response tokens."""

    def merge(self, other: "MismatchSums") -> "MismatchSums":
        """Sums of both samples together."""
        return MismatchSums(
            count=self.count + other.count,
            log_ratio=self.log_ratio + other.log_ratio,
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
            pairs=self.pairs.merge(other.pairs),
        )


def compare_log_probs(
    rollout: np.ndarray, old: np.ndarray, weights: np.ndarray | None, *, compared: np.ndarray | None = None
) -> tuple[Metrics, MismatchSums]:
    """Compare the rollout engine's log-probs [M] with the training engine's [M]; all means are over response tokens.

    `correction/k3` estimates KL(rollout || old), `correction/chi2` mean((p_old / p_rollout)^2) - 1.

    Args:
        weights: [M] bounded importance weights, for their sums.
        compared: [M] bool, which tokens the correlation is taken over; None: all.
    """
    count, d = len(rollout), rollout - old
    rollout_probs, old_probs = np.exp(rollout), np.exp(old)
    gap = np.abs(rollout_probs - old_probs)
    clamped = np.clip(d, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    ratio_less_1 = np.expm1(-clamped)
    found: Metrics = {
        "correction/probability_diff/mean": metrics.mean(gap.sum(), count),
        "correction/probability_diff/max": metrics.maximum(gap.max(initial=0.0), count),
        "correction/k3": metrics.mean((ratio_less_1 + clamped).sum(), count),
        # ratio^2 - 1 = (ratio - 1)^2 + 2 (ratio - 1), without loss where the ratio is close to 1
        "correction/chi2": metrics.mean(ratio_less_1 @ ratio_less_1 + 2.0 * ratio_less_1.sum(), count),
    }
    if compared is not None:
        rollout_probs, old_probs = rollout_probs[compared], old_probs[compared]
    return found, MismatchSums(
        count=float(count),
        log_ratio=float(d.sum()),
        weight=0.0 if weights is None else float(weights.sum()),
        weight_squared=0.0 if weights is None else float(weights @ weights),
        pairs=PairMoments.of(rollout_probs, old_probs),
    )


def merge_pairs(parts: Iterable[MismatchSums]) -> PairMoments:
    """Moments of the probabilities of all parts."""
    return reduce(PairMoments.merge, (part.pairs for part in parts), PairMoments())


def merge_mismatch(parts: Iterable[MismatchSums]) -> Metrics:
    """Metrics of the whole batch: Pearson r of rollout and old probabilities over compared tokens; over all response
    tokens the perplexity of the old policy over that of the rollout engine, and the effective sample size
    (sum w)^2 / sum w^2 as a share of tokens."""
    sums = reduce(MismatchSums.merge, parts, MismatchSums())
    if sums.count == 0:
        return {}
    merged = {"correction/perplexity_ratio": metrics.mean(math.exp(min(sums.log_ratio / sums.count, 700.0)), 1)}
    if (pearson_r := sums.pairs.pearson_r) is not None:
        merged["correction/probability_pearson_r"] = metrics.mean(pearson_r, 1)
    if sums.weight_squared > 0:
        share = sums.weight * sums.weight / sums.weight_squared / sums.count
        merged["correction/effective_sample_share"] = metrics.mean(share, 1)
    return merged
