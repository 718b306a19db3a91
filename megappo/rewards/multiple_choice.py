"""The letter of a choice.

Which letter a response chooses, by the first rule that applies:

1. `pattern` is set: the first group of its last match, if that is a letter by itself.
2. The last statement: `\\boxed{B}`, or the word "answer", "is", ":" or "=" if there is one, and the letter, in upper
   case, or within brackets in either: `the answer is (b)`, `Answer: **C**`, `correct answer is option D`. A statement
   that goes on with a second letter ("answer is A or B") chooses none.
3. The last line that is not empty, if the letter, in either case, is all of it, or is followed by `.`, `)` or `:` and
   the text of the choice: `B`, `(b)`, `B) Paris`.

Around the letter there may be brackets, stars, dollars, quotes or \\text{}.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megappo.errors import DataError
from megappo.rewards.checks import check_pattern
from megappo.rewards.exact_match import last_group
from megappo.rewards.types import Reward, Sample, answer_of

_MARKUP = re.compile(r"[*_$`\"']+|\\text(?:bf)?(?=\{)")
# All repetitions are bounded: a long response must not be tried in all its parts.
_OPEN = r"[(\[{ ]{0,3}"
_CLOSE = r"[)\]}. ]{0,4}"
_OPTION = r"(?:(?i:option|choice) )?"


@dataclass(kw_only=True, slots=True, frozen=True)
class MultipleChoice:
    """Score 1 if the response chooses the letter of the row's answer, else 0. Part `parsed`: 1 if it chooses one."""

    letters: str = "ABCD"
    """The choices there are, upper case."""
    pattern: str | None = None
    """Regular expression whose first group, of its last match, is the letter; null: the other rules of this module."""

    def __post_init__(self) -> None:
        letters = self.letters if isinstance(self.letters, str) else ""
        if len(letters) < 2 or not re.fullmatch("[A-Z]+", letters) or len(set(letters)) < len(letters):
            raise DataError(
                f"reward multiple_choice: params.letters={self.letters!r} must be two or more different letters, "
                "upper case (for example ABCD)"
            )
        if self.pattern is not None:
            check_pattern("multiple_choice", "pattern", self.pattern, groups=1)

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when a row's answer is missing or no letter of `letters`."""
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        answer = self._bare_letter(answer_of(sample))
        if answer is None:
            raise DataError(
                f"reward multiple_choice: the answer {sample.answer!r:.200} of a row of "
                f"{sample.source or 'the data source'} is none of the letters {self.letters} (set params.letters, or "
                "correct the row)"
            )
        chosen = self._chosen(sample.response)
        parts = {"parsed": float(chosen is not None)}
        return Reward(score=float(chosen == answer), parts=parts, extracted=chosen or "")

    def _chosen(self, response: str) -> str | None:
        if self.pattern is not None:
            found = last_group(self.pattern, response)
            return None if found is None else self._bare_letter(found)
        statements = list(re.finditer(self._statement(), _plain(response)))
        if statements:
            last = statements[-1]
            return None if last["second"] else (last["boxed"] or last["upper"] or last["bracketed"]).upper()
        line = next((_plain(line) for line in reversed(response.splitlines()) if line.strip()), "")
        leading = re.match(rf"{_OPEN}([{self._both_cases()}])[.):] ?\S", line)
        return self._bare_letter(line) or (leading.group(1).upper() if leading else None)

    def _statement(self) -> str:
        boxed = rf"\\boxed\{{{_OPEN}(?P<boxed>[{self._both_cases()}])[) }}]{{0,3}}"
        one = rf"(?:[(\[{{] ?(?P<bracketed>[{self._both_cases()}]) ?[)\]}}]|(?P<upper>[{self.letters}])\b)"
        word = rf"(?i:\banswer\b) ?(?:(?i:is)\b)? ?[:=]? ?{_OPTION}"
        # A list goes on, or is at its end; "B, A is wrong" is none.
        comma = rf",(?= ?{_OPEN}[{self.letters}]{_CLOSE}(?:$|[,;/&]|or\b|and\b))"
        further = rf"{_CLOSE}(?:/|&|or\b|and\b|{comma}) ?{_OPTION}{_OPEN}[{self.letters}]\b"
        return rf"{boxed}|{word}{one}(?P<second>{further})?"

    def _both_cases(self) -> str:
        return self.letters + self.letters.lower()

    def _bare_letter(self, text: str) -> str | None:
        found = re.fullmatch(rf"{_OPEN}([{self._both_cases()}]){_CLOSE}", _plain(text))
        return found.group(1).upper() if found else None


def _plain(text: str) -> str:
    """Return the text without markup and quotes, and with single spaces."""
    return " ".join(_MARKUP.sub("", text).split())
