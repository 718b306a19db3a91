"""The optimal token baseline.

Shapes: M response tokens, B sequences.
"""

import numpy as np

from megappo.algo.advantages.base import TokenAdvantages, TokenInputs
from megappo.algo.masked import compact
from megappo.algo.scan import suffix_sums
from megappo.batch.fields import offsets_of
from megappo.config.algorithm import AdvantageConfig

SUM_ROUNDING = 1e-4
"""Most that fp32 moves a sum of squared probabilities, which is at most 1."""


def optimal_token_baseline(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Baseline per step, weighted by the gradient variance that the samples of the group have gathered so far.

    Formula: A_it = G_it - sum_j G_jt W_jt / sum_j W_jt over the samples j of the group that have a step t, steps
        counted over response tokens; G_it = rewards of i from t on; W_it = sum up to t of
        1 - 2 pi_t + sum_v pi_v^2 under the old policy, a term that lies in [(1 - pi_t)^2, 2 (1 - pi_t)^2]: rounding
        that leaves this range is cut off. Where one sample remains, or all W are 0, the baseline is 0; a group of
        one gives 0.
    Source: Li et al. 2026, The Optimal Token Baseline, arXiv:2602.07078.
    Config: none. Needs sum_v pi_v^2 from the forward pass; all samples of a group on one shard.
    Use: long responses with terminal rewards, when the group mean is too noisy a baseline.
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None
    tokens = compact(inputs.mask, inputs.offsets)
    sequence, everywhere = tokens.sequence, np.ones(len(tokens.index), dtype=bool)
    returns = suffix_sums(tokens.gather(inputs.rewards), everywhere, tokens.offsets, 1.0)
    energy = _energy(tokens.gather(inputs.old_log_probs), tokens.gather(inputs.sum_pi_squared))
    weights = _running_sums(energy, tokens.lengths)
    occupied = tokens.lengths > 0
    _, group = np.unique(inputs.group_ids, return_inverse=True)
    longest = int(tokens.lengths.max()) if len(tokens.lengths) else 0
    step = np.arange(len(returns)) - tokens.offsets[sequence]
    cell = group[sequence] * longest + step
    count, weight = np.bincount(cell), np.bincount(cell, weights=weights)
    weighted = np.bincount(cell, weights=returns * weights)
    defined = (count > 1) & (weight != 0)
    # A number that is not finite makes advantages that are not: the update reports them, numpy need not.
    with np.errstate(invalid="ignore"):
        baseline = np.where(defined, weighted / np.where(defined, weight, 1.0), 0.0)[cell]
    alone = np.bincount(group, weights=occupied)[group[sequence]] == 1
    return TokenAdvantages(advantages=tokens.scatter(np.where(alone, 0.0, returns - baseline), inputs.rewards.dtype))


def _energy(log_probs: np.ndarray, sum_pi_squared: np.ndarray) -> np.ndarray:
    """Return 1 - 2 pi + sum_v pi_v^2 of each token, [M].

    It is (1 - pi)^2 plus the squares of the other tokens, which are at most (1 - pi)^2 together. Where pi is close to 1
    the given sum is close to 1 too, and its rounding is larger than the result and of either sign; the bounds, which
    the log-prob gives to full precision, then leave an error of at most a factor of 2. A sum that rounding cannot have
    moved out of the bounds is of no distribution, or not finite, and is taken as it is.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        smallest = np.square(np.expm1(log_probs))
        raw = 1.0 - 2.0 * np.exp(log_probs) + sum_pi_squared
        bounded = np.clip(raw, smallest, 2.0 * smallest)
        return np.where(np.abs(raw - bounded) <= SUM_ROUNDING, bounded, raw)


def _running_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sum of each sequence's values up to and including each token, [M]; lengths [B]."""
    backwards = suffix_sums(values[::-1].copy(), np.ones(len(values), dtype=bool), offsets_of(lengths[::-1]), 1.0)
    return backwards[::-1].copy()
