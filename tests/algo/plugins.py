"""An estimator and a loss as a user would bring them from outside."""

import numpy as np

from megappo.algo.advantages.base import Estimator, SequenceInputs
from megappo.algo.losses import LossInputs, PolicyLoss, TokenLosses
from megappo.config.algorithm import AdvantageConfig, Aggregation, PolicyLossConfig
from megappo.config.algorithm_declarations import AdvantageScope, EstimatorDeclaration, LossDeclaration


def negative_scores(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    return -inputs.scores


def squared_log_probs(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    return TokenLosses(losses=inputs.log_probs.square())


def one_number(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    return inputs.scores.mean()


greedy_reader = Estimator(
    declaration=EstimatorDeclaration(scope=AdvantageScope.sequence, reads_greedy_scores=True),
    sequence_stage=negative_scores,
)
squares_reader = Estimator(
    declaration=EstimatorDeclaration(scope=AdvantageScope.sequence, reads_sum_pi_squared=True),
    sequence_stage=negative_scores,
)
selecting = PolicyLoss(declaration=LossDeclaration(selects_tokens=True), function=squared_log_probs)
sequence_mean_only = PolicyLoss(
    declaration=LossDeclaration(aggregation=Aggregation.sequence_mean_token_mean, fixed_aggregation=True),
    function=squared_log_probs,
)
