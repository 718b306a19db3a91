"""1 if the response is the answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megappo.rewards.checks import check_pattern, check_switch
from megappo.rewards.types import Reward, Sample, answer_of


@dataclass(kw_only=True, slots=True, frozen=True)
class ExactMatch:
    """Score 1 if the response, or what `pattern` finds in it, equals the answer, else 0."""

    strip: bool = True
    """Leave out white space around both."""
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    pattern: str | None = None
    """Regular expression: the first group of its last match in the response is compared instead of all of it, for
    example `<answer>(.*?)</answer>`. The dot matches line breaks too. No match scores 0."""

    def __post_init__(self) -> None:
        check_switch("exact_match", "strip", self.strip)
        check_switch("exact_match", "ignore_case", self.ignore_case)
        if self.pattern is not None:
            check_pattern("exact_match", "pattern", self.pattern, groups=1)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when a row has no answer."""
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        answer = self._text(answer_of(sample))
        found = sample.response if self.pattern is None else last_group(self.pattern, sample.response)
        if found is None:
            return Reward(score=0.0, extracted="")
        return Reward(score=float(self._text(found) == answer), extracted=self._text(found))

    def _text(self, text: str) -> str:
        stripped = text.strip() if self.strip else text
        return stripped.casefold() if self.ignore_case else stripped


def last_group(pattern: str, text: str) -> str | None:
    """Return the first group of the last match of `pattern` in `text`; None: no match, or none of the group."""
    found = None
    for match in re.finditer(pattern, text, re.DOTALL):
        found = match.group(1)
    return found
