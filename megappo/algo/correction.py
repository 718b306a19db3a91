"""Correction of the difference between rollout and training engine: importance weights, rejection, metrics.

Shapes: M response tokens, B sequences. d = rollout log-prob - old log-prob. Everything is detached numbers; advantages
are computed before, so rejecting the last token never loses the reward.
"""

from collections.abc import Callable

import numpy as np

from megappo.algo.kl import EXPONENT_LIMIT
from megappo.algo.masked import MaskedTokens
from megappo.config.algorithm import (
    CorrectionLevel,
    CorrectionMode,
    CorrectionWeightConfig,
    RejectConfig,
    RejectEstimator,
    RejectLevel,
)


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
