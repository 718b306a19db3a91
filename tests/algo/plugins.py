"""An estimator and a loss as a user would bring them from outside."""

import numpy as np

from megappo.algo.advantages.base import SequenceInputs
from megappo.algo.losses import LossInputs, TokenLosses
from megappo.config.algorithm import AdvantageConfig, PolicyLossConfig


def negative_scores(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    return -inputs.scores


def squared_log_probs(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    return TokenLosses(losses=inputs.log_probs.square())


def one_number(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    return inputs.scores.mean()
