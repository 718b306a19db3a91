"""How token losses become one number: a weight per token, computed once per mini-batch before the update.

Shapes: B sequences of the whole mini-batch, over all ranks.
"""

import numpy as np

from megappo.config.algorithm import Aggregation


def compute_loss_weights(
    loss_tokens: np.ndarray, group_ids: np.ndarray, *, mode: Aggregation, constant_length: float | None
) -> np.ndarray:
    """Weight of each loss token of each sequence, [B] float64: loss = sum over tokens of weight * token loss.

    Formula: with n_i loss tokens in sequence i, N = sum n_i, S sequences with n_i > 0, P prompts with loss tokens:
        token_mean 1/N; sequence_mean_token_mean 1/(S n_i); sequence_mean_token_sum 1/S; token_sum_constant
        1/(S constant_length); prompt_mean 1/(P tokens of the prompt). Counts are of the whole mini-batch over all
        ranks, after truncation and rejection, so no micro-batch or rank needs to know another.
    Source: token_mean: DAPO, arXiv:2503.14476; sequence_mean_token_mean: GRPO, arXiv:2402.03300;
        token_sum_constant: Dr.GRPO, arXiv:2503.20783.
    Config: policy_loss.aggregation (null: the loss's own), policy_loss.constant_length.
    Use: token_mean weighs long responses by their length; sequence means weigh responses alike; a constant length
        does neither, and keeps the gradient of a token independent of the others.

    Args:
        loss_tokens: [B] int: tokens on the loss mask, after truncation and rejection.
        group_ids: [B] int64.
        constant_length: for token_sum_constant, in tokens.
    """
    occupied = loss_tokens > 0
    sequences = max(1, int(occupied.sum()))
    if mode is Aggregation.token_mean:
        weights = np.full(len(loss_tokens), 1.0 / max(1, int(loss_tokens.sum())))
    elif mode is Aggregation.sequence_mean_token_mean:
        weights = 1.0 / (sequences * np.maximum(loss_tokens, 1))
    elif mode is Aggregation.sequence_mean_token_sum:
        weights = np.full(len(loss_tokens), 1.0 / sequences)
    elif mode is Aggregation.token_sum_constant:
        assert constant_length is not None, "a configuration rule asks for it"
        weights = np.full(len(loss_tokens), 1.0 / (sequences * constant_length))
    else:
        _, group = np.unique(group_ids, return_inverse=True)
        tokens = np.bincount(group, weights=loss_tokens)
        prompts = max(1, int((tokens > 0).sum()))
        weights = (1.0 / (prompts * np.maximum(tokens, 1)))[group]
    return np.where(occupied, weights, 0.0)
