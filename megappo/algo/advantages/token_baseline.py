"""The optimal token baseline.

Shapes: M response tokens, B sequences.
"""

import numpy as np

from megappo.algo.advantages.base import TokenAdvantages, TokenInputs
from megappo.algo.advantages.returns import discounted_returns
from megappo.batch.fields import offsets_of
from megappo.config.algorithm import AdvantageConfig


def optimal_token_baseline(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Baseline per step, weighted by the gradient variance that the samples of the group have gathered so far.

    Formula: A_it = G_it - sum_j G_jt W_jt / sum_j W_jt over the samples j of the group that have a step t, steps
        counted over response tokens; G_it = rewards of i from t on; W_it = sum up to t of
        1 - 2 pi_t + sum_v pi_v^2 under the old policy. Where one sample remains, or all W are 0, the baseline is 0;
        a group of one gives 0.
    Source: Li et al. 2026, The Optimal Token Baseline, arXiv:2602.07078.
    Config: none. Needs sum_v pi_v^2 from the forward pass; all samples of a group on one shard.
    Use: long responses with terminal rewards, when the group mean is too noisy a baseline.
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None
    tokens = inputs.tokens
    returns = discounted_returns(inputs.rewards, tokens.offsets, 1.0)
    energy = 1.0 - 2.0 * np.exp(inputs.old_log_probs) + inputs.sum_pi_squared
    weights = _running_sums(energy, tokens.lengths)
    occupied = tokens.lengths > 0
    _, group = np.unique(inputs.group_ids, return_inverse=True)
    longest = int(tokens.lengths.max()) if len(tokens.lengths) else 0
    step = np.arange(len(returns)) - tokens.offsets[tokens.sequence]
    cell = group[tokens.sequence] * longest + step
    count, weight = np.bincount(cell), np.bincount(cell, weights=weights)
    weighted = np.bincount(cell, weights=returns * weights)
    defined = (count > 1) & (weight != 0)
    baseline = np.where(defined, weighted / np.where(defined, weight, 1.0), 0.0)[cell]
    alone = np.bincount(group, weights=occupied)[group[tokens.sequence]] == 1
    return TokenAdvantages(advantages=np.where(alone, 0.0, returns - baseline))


def _running_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sum of each sequence's values up to and including each token, [M]; lengths [B]."""
    backwards = discounted_returns(values[::-1].copy(), offsets_of(lengths[::-1]), 1.0)
    return backwards[::-1].copy()
