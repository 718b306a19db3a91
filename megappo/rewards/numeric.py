"""One number, as in GSM8K.

A number is: a sign, digits (with or without commas between groups of three), a decimal part, an exponent; or two whole
numbers with a slash between them. Other commas separate numbers. A currency sign before it, and a percent sign or any
other unit after it, are not part of it. A minus sign behind a letter, a digit or a closing bracket is an operator: the
last number of "10-5" is 5. Powers, roots and LaTeX fractions are no numbers here (`math_verify` reads them).

Which number a response gives:

- strict: its last "####" is followed, on the same line, by one number and no other.
- flexible: that number if there is one, else the last number of the response.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megappo.errors import DataError
from megappo.rewards.checks import check_choice, check_number, check_switch
from megappo.rewards.types import Reward, Sample, answer_of

MARK = "####"
_MODES = ("strict", "flexible")
_MAX_DIGITS = 400
"""Longer texts are no numbers: reading them takes time that grows with the square of their length."""

# Digits and commas are taken as one run, possessively, and told apart afterwards: long ones take linear time.
_RUN = r"\d++(?:,\d++)*+"
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+")
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]])[-\u2212+])?[$\u20ac\u00a3]?(?P<minus_behind>(?<=[$\u20ac\u00a3])[-\u2212+])?"
    rf"(?:(?<!/)(?P<over>{_RUN})/(?P<under>\d++)(?!/|,\d|\.\d)"
    rf"|(?P<run>{_RUN})(?P<tail>(?:\.\d++)?{_EXPONENT})|(?P<decimals>\.\d++{_EXPONENT}))(?P<percent>\s?\\?%)?"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Numeric:
    """Score 1 if the response gives the number of the row's answer, else 0. Part `parsed`: 1 if it gives a number;
    part `marked`: 1 if it does so in the strict form.

    The row's answer is a number, possibly with a unit, or a text whose last line is `#### number`.
    """

    mode: str = "flexible"
    """strict or flexible."""
    tolerance: float = 0.0
    """Largest relative difference that counts as equal; 0: equal values, in whatever way they are written."""
    percent: bool = False
    """50% is 0.5; otherwise the sign is a unit, and 50% is 50."""

    def __post_init__(self) -> None:
        check_choice("numeric", "mode", self.mode, _MODES)
        check_number("numeric", "tolerance", self.tolerance, least=0.0, most=1.0)
        check_switch("numeric", "percent", self.percent)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when a row's answer is missing or not one number."""
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        answer = answer_of(sample)
        gold = self._only_number(answer.rpartition(MARK)[2])
        if gold is None:
            raise DataError(
                f"reward numeric: the answer {answer!r:.200} of a row of {sample.source or 'the data source'} is not "
                "one number (correct the row, or use math_verify or exact_match)"
            )
        marked = self._marked(sample.response)
        found = marked
        if found is None and self.mode == "flexible":
            found = next(reversed(self._numbers(sample.response)), None)
        return Reward(
            score=float(found is not None and self._equal(found, gold)),
            parts={"parsed": float(found is not None), "marked": float(marked is not None)},
            extracted="" if found is None else str(found),
        )

    def _equal(self, found: Fraction, gold: Fraction) -> bool:
        return abs(found - gold) <= Fraction(self.tolerance) * abs(gold)

    def _marked(self, response: str) -> Fraction | None:
        _, mark, after = response.rpartition(MARK)
        return self._only_number(after.split("\n", 1)[0]) if mark else None

    def _only_number(self, text: str) -> Fraction | None:
        numbers = self._numbers(text)
        return numbers[0] if len(numbers) == 1 else None

    def _numbers(self, text: str) -> list[Fraction]:
        return [number for match in _NUMBER.finditer(text) for number in self._read(match)]

    def _read(self, match: re.Match[str]) -> list[Fraction]:
        """Return the number of a match; several where its commas separate a list."""
        if match["decimals"]:
            texts = [match["decimals"]]
        else:
            texts = _split(match["over"] or match["run"])
            texts[-1] += "/" + match["under"] if match["under"] else match["tail"]
        numbers = [number for number in map(_value, texts) if number is not None]
        if numbers and self.percent and match["percent"]:
            numbers[-1] /= 100
        if numbers and (match["minus"] or match["minus_behind"] or "+") in "-\u2212":
            numbers[0] = -numbers[0]
        return numbers


def _split(run: str) -> list[str]:
    """Return the digits of a number whose commas stand between groups of three, or of each number of a list."""
    return [run.replace(",", "")] if _GROUPED.fullmatch(run) else run.split(",")


def _value(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None
