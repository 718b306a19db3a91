"""Numbers and LaTeX expressions compared by value (math-verify)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megappo.errors import DataError
from megappo.rewards.types import Reward, Sample, answer_of


@dataclass(kw_only=True, slots=True, frozen=True)
class MathVerify:
    """Score 1 if the last expression of the response equals the answer, else 0. Part `parsed`: 1 if the response
    holds an expression at all.

    In the main thread of a process every parse and comparison ends after `timeout_s` and counts as wrong. In other
    threads the library cannot interrupt itself: there `reward.timeout_s` bounds the whole call.
    """

    timeout_s: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.timeout_s, int) or isinstance(self.timeout_s, bool) or self.timeout_s < 1:
            raise DataError(f"reward math_verify: params.timeout_s={self.timeout_s!r} must be whole seconds, 1 or more")

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError when an answer is missing or no expression."""
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        from math_verify import verify

        answer = answer_of(sample)
        # A bare answer is LaTeX, not prose: in prose the last number of "\frac{1}{2}" would be taken for it.
        gold = self._parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
        if not gold:
            raise DataError(
                f"reward math_verify: the answer {answer!r:.200} of a row of {sample.source or 'the data source'} is "
                "no number or LaTeX expression (correct the row, or use exact_match)"
            )
        found = self._parse(sample.response)
        equal = bool(found) and verify(gold, found, timeout_seconds=self._timeout())
        return Reward(
            score=float(equal), parts={"parsed": float(bool(found))}, extracted=_written(found[0]) if found else ""
        )

    def _parse(self, text: str) -> list[Any]:  # Any: sympy expressions and strings
        from math_verify import parse

        # None switches the library's own timeout off; its annotation lacks it.
        return parse(text, parsing_timeout=self._timeout())  # type: ignore[arg-type]

    def _timeout(self) -> int | None:
        return self.timeout_s if threading.current_thread() is threading.main_thread() else None


def _written(expression: Any) -> str:  # Any: a sympy expression
    """Return a text that equal numbers share."""
    import sympy

    try:
        return str(sympy.Rational(str(expression)))
    except (TypeError, ValueError):
        return str(expression)
