"""What an advantage estimator is given and gives back.

Shapes: B sequences, N packed tokens, G groups. Numbers of sequences are float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megappo.algo.advantages.groups import GroupedValues
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
    """What estimators of scope `token` and `group_token` see: the packed tokens of one shard. Off the mask the fields
    may hold anything, NaN included: `compact` and the functions of `megappo.algo.scan` don't read it."""

    mask: np.ndarray
    """[N] bool, True on response tokens."""
    offsets: np.ndarray
    """[B+1] int64."""
    rewards: np.ndarray
    """[N] float32 or float64: token rewards, penalties and KL included."""
    group_ids: np.ndarray
    """[B] int64."""
    sequence_advantages: np.ndarray | None = None
    """[B]: from the sequence stage of the estimator, if it has one."""
    values: np.ndarray | None = None
    """[N] critic value of the state before each token."""
    old_log_probs: np.ndarray | None = None
    """[N]."""
    sum_pi_squared: np.ndarray | None = None
    """[N] sum over the vocabulary of squared probabilities."""

    def spread(self, per_sequence: np.ndarray) -> np.ndarray:
        """Return a number per sequence [B] at each of its response tokens and 0 elsewhere, [N]."""
        spread = np.repeat(per_sequence.astype(self.rewards.dtype), np.diff(self.offsets))
        np.copyto(spread, 0, where=~self.mask)
        return spread


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenAdvantages:
    """Advantages before whitening, and the critic's targets where the estimator has a critic; 0 off the mask."""

    advantages: np.ndarray
    """[N]."""
    returns: np.ndarray | None = None
    """[N]."""


SequenceStage = Callable[[SequenceInputs, AdvantageConfig], np.ndarray]
"""Advantages [B]; empty sequences are never among the inputs."""
TokenStage = Callable[[TokenInputs, AdvantageConfig], TokenAdvantages]
SignalStage = Callable[[SequenceInputs, AdvantageConfig], np.ndarray]
"""Whether the group of each sequence carries signal, [B] bool; empty sequences are never among the inputs."""


def scores_differ(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Whether the scores of the group differ, [B] bool: what signal is to estimators that compare samples by them."""
    groups = GroupedValues(inputs.scores, inputs.group_ids)
    return groups.spread(groups.have_signal())


def spread_over_tokens(inputs: TokenInputs, config: AdvantageConfig) -> TokenAdvantages:
    """Give every response token the advantage of its sequence."""
    assert inputs.sequence_advantages is not None
    return TokenAdvantages(advantages=inputs.spread(inputs.sequence_advantages))


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimator:
    """An advantage estimator: what it declares, a stage over sequences (scope `sequence`) and one over tokens, and
    which groups it learns from."""

    declaration: EstimatorDeclaration
    sequence_stage: SequenceStage | None = None
    token_stage: TokenStage = spread_over_tokens
    signal_stage: SignalStage = scores_differ
    """For dynamic sampling and its metric: false where every sample of the group gets an advantage of 0."""

    @property
    def scope(self) -> AdvantageScope:
        """Which numbers it looks at, hence where it runs."""
        return self.declaration.scope

    def __post_init__(self) -> None:
        if (self.declaration.scope is AdvantageScope.sequence) != (self.sequence_stage is not None):
            raise ValueError("an estimator has a sequence stage exactly when its scope is sequence")
