"""Penalties for the number of tokens of a response.

Lengths are the tokens that were generated (the end token included), not words: they need `Sample.response_tokens`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.errors import DataError
from megappo.rewards.checks import check_count, check_switch
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class Length:
    """Score from 0 at the target down to -1: -min(1, |tokens - target_tokens| / scale_tokens).

    Shorter responses score 0 unless `both_sides`. With both sides it is the length term of LCPO-Exact (Aggarwal and
    Welleck 2025, arXiv:2503.04697, eq. 1) with alpha = 1 / scale_tokens, bounded. Part `tokens`: the length.
    """

    target_tokens: int
    scale_tokens: int
    """Distance from the target at which the score is -1."""
    both_sides: bool = False
    """Shorter responses lose as much as longer ones."""

    def __post_init__(self) -> None:
        check_count("length", "target_tokens", self.target_tokens, least=0)
        check_count("length", "scale_tokens", self.scale_tokens, least=1)
        check_switch("length", "both_sides", self.both_sides)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when the tokens of a response were not counted."""
        return [self._reward(tokens_of(sample)) for sample in samples]

    def _reward(self, tokens: int) -> Reward:
        distance = tokens - self.target_tokens
        excess = abs(distance) if self.both_sides else max(0, distance)
        # 0 - x: no negative zero.
        return Reward(score=0.0 - min(1.0, excess / self.scale_tokens), parts={"tokens": float(tokens)})


@dataclass(kw_only=True, slots=True, frozen=True)
class Overlong:
    """Soft over-long penalty (Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13): 0 up to max_tokens - buffer_tokens,
    -1 from max_tokens on, and a line between. Part `over`: 1 where it is below 0.

    `algorithm.overlong` takes the same penalty off the token rewards, after scoring. As a reward it is part of the
    score: of `reward/mean`, of what dynamic sampling calls signal, of validation. Use one of the two.
    """

    max_tokens: int
    """Most tokens of a response, as in rollout.sampling.max_new_tokens."""
    buffer_tokens: int

    def __post_init__(self) -> None:
        check_count("overlong", "max_tokens", self.max_tokens, least=1)
        check_count("overlong", "buffer_tokens", self.buffer_tokens, least=1, most=self.max_tokens)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when the tokens of a response were not counted."""
        return [self._reward(tokens_of(sample)) for sample in samples]

    def _reward(self, tokens: int) -> Reward:
        excess = tokens - (self.max_tokens - self.buffer_tokens)
        penalty = min(1.0, max(0, excess) / self.buffer_tokens)
        return Reward(score=0.0 - penalty, parts={"over": float(penalty > 0)})


def tokens_of(sample: Sample) -> int:
    """Return the number of tokens of the response. Raises DataError when it was not counted."""
    if sample.response and not sample.response_tokens:
        raise DataError(
            f"reward: the tokens of response {sample.response!r:.200} were not counted (fill Sample.response_tokens "
            "where the sample is made)"
        )
    return sample.response_tokens
