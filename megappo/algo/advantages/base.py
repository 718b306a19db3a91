"""What an advantage estimator is given and gives back.

Shapes: B sequences, M response tokens (compacted), G groups. All numbers are float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megappo.algo.masked import MaskedTokens
from megappo.config.algorithm import AdvantageConfig
from megappo.config.algorithm_declarations import AdvantageScope, EstimatorDeclaration


@dataclass(kw_only=True, slots=True, frozen=True)
class SequenceInputs:
    """What estimators of scope `sequence` see: one row per sequence of the whole batch, in any order."""

    scores: np.ndarray
    """[B] float64: s_i, the sum of the sequence's token rewards, penalties and KL included."""
    sequence_ids: np.ndarray
    """[B] int64."""
    group_ids: np.ndarray
    """[B] int64: all samples of one draw share it."""
    response_tokens: np.ndarray
    """[B] int64: tokens the policy sampled; a sequence with 0 is empty and takes part in nothing."""
    parts: Sequence[Mapping[str, float]] = ()
    """[B]: the parts of each sequence's reward by name (gdpo); a part may be absent from some sequences."""
    greedy_scores: np.ndarray | None = None
    """[B] float64: score of the greedy answer to the same prompt (remax)."""

    def select(self, rows: np.ndarray) -> "SequenceInputs":
        """Return the given rows."""
        return replace(
            self,
            scores=self.scores[rows],
            sequence_ids=self.sequence_ids[rows],
            group_ids=self.group_ids[rows],
            response_tokens=self.response_tokens[rows],
            parts=[self.parts[row] for row in rows] if self.parts else (),
            greedy_scores=None if self.greedy_scores is None else self.greedy_scores[rows],
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenInputs:
    """What estimators of scope `token` and `group_token` see: the response tokens of one shard."""

    tokens: MaskedTokens
    rewards: np.ndarray
    """[M] token rewards, penalties and KL included."""
    group_ids: np.ndarray
    """[B] int64."""
    sequence_advantages: np.ndarray | None = None
    """[B]: from the sequence stage of the estimator, if it has one."""
    values: np.ndarray | None = None
    """[M] critic value of the state before each token."""
    old_log_probs: np.ndarray | None = None
    """[M]."""
    sum_pi_squared: np.ndarray | None = None
    """[M] sum over the vocabulary of squared probabilities."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenAdvantages:
    """Advantages before whitening, and the critic's targets where the estimator has a critic."""

    advantages: np.ndarray
    """[M]."""
    returns: np.ndarray | None = None
    """[M]."""


SequenceStage = Callable[[SequenceInputs, AdvantageConfig], np.ndarray]
"""Advantages [B]; empty sequences are never among the inputs."""
TokenStage = Callable[[TokenInputs, AdvantageConfig], TokenAdvantages]


def spread_over_tokens(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Give every response token the advantage of its sequence."""
    assert inputs.sequence_advantages is not None
    return TokenAdvantages(advantages=inputs.sequence_advantages[inputs.tokens.sequence])


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimator:
    """An advantage estimator: what it declares, a stage over sequences (scope `sequence`) and one over tokens."""

    declaration: EstimatorDeclaration
    sequence_stage: SequenceStage | None = None
    token_stage: TokenStage = spread_over_tokens

    @property
    def scope(self) -> AdvantageScope:
        """Which numbers it looks at, hence where it runs."""
        return self.declaration.scope

    def __post_init__(self) -> None:
        if (self.declaration.scope is AdvantageScope.sequence) != (self.sequence_stage is not None):
            raise ValueError("an estimator has a sequence stage exactly when its scope is sequence")
