"""Estimators that sum the rewards that follow a token.

Shapes: N packed tokens, B sequences. "Next" is the next response token of the same sequence: prompt, tool and
observation tokens are jumped over, with neither decay nor reward.
"""

import numpy as np

from megappo.algo.advantages.base import SequenceInputs, TokenAdvantages, TokenInputs
from megappo.algo.advantages.groups import ROUNDING
from megappo.algo.errors import AlgorithmInputError
from megappo.algo.scan import generalized_advantages, suffix_sums
from megappo.config.algorithm import AdvantageConfig


def gae(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Generalised advantage estimation.

    Formula: delta_t = R_t + gamma V_next - V_t; A_t = delta_t + gamma lam A_next; V and A after the last response
        token are 0. returns = A + V before whitening; then A is whitened over the response tokens of the global batch.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    Config: gamma, lam, whiten. Needs a critic.
    Use: PPO with a critic; long responses where a baseline per token pays.
    """
    assert inputs.values is not None
    advantages, returns = generalized_advantages(
        inputs.rewards, inputs.values, inputs.mask, inputs.offsets, gamma=config.gamma, lam=config.lam
    )
    return TokenAdvantages(advantages=advantages, returns=returns)


def reinforce_plus_plus(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Discounted return with global normalisation.

    Formula: A_t = R_t + gamma A_next, then whitened over the response tokens of the global batch.
    Source: Hu 2025, REINFORCE++, arXiv:2501.03262.
    Config: gamma, whiten.
    Use: one sample per prompt and no critic; KL in reward gives a signal per token.
    """
    return TokenAdvantages(advantages=suffix_sums(inputs.rewards, inputs.mask, inputs.offsets, config.gamma))


def remax_baseline(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Return minus the greedy score, [B]; `remax` adds the returns."""
    return -_greedy_scores(inputs)


def beats_or_misses_greedy(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Whether a sample of the group scores otherwise than the greedy answer, [B] bool: the signal of remax."""
    greedy = _greedy_scores(inputs)
    limit = ROUNDING * np.maximum(np.abs(inputs.scores), np.abs(greedy))
    # A score that is not finite differs, so that it is reported and not dropped.
    differs = ~(np.abs(inputs.scores - greedy) <= limit)
    return np.isin(inputs.group_ids, inputs.group_ids[differs])


def _greedy_scores(inputs: SequenceInputs) -> np.ndarray:
    if inputs.greedy_scores is None:
        raise AlgorithmInputError(int(inputs.sequence_ids[0]), "greedy_score", "is missing, remax needs it")
    return inputs.greedy_scores


def remax(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Return minus the score of the greedy answer to the same prompt.

    Formula: A_t = sum of the rewards from t on - greedy score.
    Source: Li et al. 2024, ReMax, arXiv:2310.10505.
    Config: none.
    Use: one sample per prompt; the baseline costs one greedy answer per prompt.
    """
    assert inputs.sequence_advantages is not None
    returns = suffix_sums(inputs.rewards, inputs.mask, inputs.offsets, 1.0)
    return TokenAdvantages(advantages=returns + inputs.spread(inputs.sequence_advantages))
