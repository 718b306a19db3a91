"""Penalty for text that repeats itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.rewards.checks import check_choice, check_count, check_number
from megappo.rewards.types import Reward, Sample

_UNITS = ("word", "character")


@dataclass(kw_only=True, slots=True, frozen=True)
class Repetition:
    """Score from 0, all n-grams differ, down to -1 (Yeo et al. 2025, arXiv:2502.03373, appendix).

    The share of n-grams that occurred before is 1 - distinct / all; the score is
    -max(0, share - free_share) / (1 - free_share). Fewer than n units have no n-gram and score 0. Part `share`.
    """

    n: int = 4
    """Units in an n-gram."""
    unit: str = "word"
    """word: what white space separates, in lower case; character: for languages that write without spaces."""
    free_share: float = 0.0
    """Share that costs nothing: some repetition is ordinary language."""

    def __post_init__(self) -> None:
        check_count("repetition", "n", self.n, least=1)
        check_choice("repetition", "unit", self.unit, _UNITS)
        check_number("repetition", "free_share", self.free_share, least=0.0, most=0.99)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order."""
        return [self._reward(sample.response) for sample in samples]

    def _reward(self, response: str) -> Reward:
        units = response.lower().split() if self.unit == "word" else response
        grams = [tuple(units[start : start + self.n]) for start in range(len(units) - self.n + 1)]
        share = 1.0 - len(set(grams)) / len(grams) if grams else 0.0
        # 0 - x: no negative zero.
        score = 0.0 - max(0.0, share - self.free_share) / (1.0 - self.free_share)
        return Reward(score=score, parts={"share": share})
