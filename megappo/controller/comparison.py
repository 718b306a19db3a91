"""What the comparison of engine and trainer found in one step.

Shapes: B sequences of the step, in order of their ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megappo.algo.diagnostics import SequenceGaps
from megappo.controller.ports import SequenceInfo


@dataclass(kw_only=True, slots=True, frozen=True)
class StepComparison:
    """What the comparison of one step found, per sequence."""

    step: int
    version: int
    """Of the weights that the trainer compared with."""
    sequences: Sequence[SequenceInfo]
    """[B]."""
    gaps: SequenceGaps
    """[B] per field."""
    pearson_r: float | None
    """Correlation of the probabilities."""

    @property
    def mean(self) -> float:
        """Mean difference over the compared tokens, in nats."""
        return float(self.gaps.total.sum()) / int(self.gaps.tokens.sum())

    @property
    def largest(self) -> float:
        """Largest difference of a compared token, in nats."""
        return float(self.gaps.largest.max())

    def worst(self, count: int, *, by_mean: bool) -> list[int]:
        """Return positions of the sequences with the largest mean difference, or the largest one of a token."""
        means = self.gaps.total / np.maximum(self.gaps.tokens, 1)
        # A difference that is not finite is the worst of all; sequences without a compared token are none.
        keys = np.nan_to_num(means if by_mean else self.gaps.largest, nan=np.inf)
        order = np.argsort(np.where(self.gaps.tokens > 0, -keys, np.inf), kind="stable")
        return order[: min(count, int((self.gaps.tokens > 0).sum()))].tolist()

    def describe(self, row: int) -> str:
        """Return the sequence at a position and its difference in words."""
        info, tokens = self.sequences[row], int(self.gaps.tokens[row])
        return (
            f"sequence {info.sequence_id} (group {info.group_id}, row {info.row}, version {info.policy_version}): mean "
            f"{self.gaps.total[row] / tokens:.3g}, max {self.gaps.largest[row]:.3g} nats over {tokens} tokens"
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class ParityFinding:
    """A step that is beyond a limit of `rollout.parity`."""

    comparison: StepComparison
    reasons: list[str]
    """The exceeded limits, in words."""
    stops: bool
    """Whether the run ends."""
    worst: list[int]
    """Positions of the worst sequences, at most `rollout.parity.dump` of them, but always one; worst first."""
