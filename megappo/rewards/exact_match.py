"""1 if the response is the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.errors import DataError
from megappo.rewards.types import Reward, Sample, answer_of


@dataclass(kw_only=True, slots=True, frozen=True)
class ExactMatch:
    """Score 1 if the response equals the answer, else 0."""

    strip: bool = True
    """Leave out white space around both."""

    def __post_init__(self) -> None:
        if not isinstance(self.strip, bool):
            raise DataError(f"reward exact_match: params.strip={self.strip!r} must be true or false")

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when a row has no answer."""
        return [Reward(score=float(self._text(sample.response) == self._text(answer_of(sample)))) for sample in samples]

    def _text(self, text: str) -> str:
        return text.strip() if self.strip else text
