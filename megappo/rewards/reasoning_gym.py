"""The scorers of reasoning-gym's tasks.

Some scorers evaluate the response as a Python literal or expression: score untrusted models in a sandbox.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megappo.errors import DataError
from megappo.rewards.checks import check_switch
from megappo.rewards.types import Reward, Sample

CORRECT = 0.999
"""Scores from here on count as correct: scorers add up fractions."""


@dataclass(kw_only=True, slots=True)
class ReasoningGym:
    """Score by the task's own scorer, between 0 and 1. Part `correct`: 1 from a score of 0.999 on."""

    task: str
    # Any: the parameters belong to the task.
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task, as in the data source: some scorers depend on them."""
    binary: bool = False
    """Score 1 from 0.999 on and 0 below: no credit for answers that are right in part."""
    # Any: the library has no types.
    _scorer: Any = field(init=False)

    def __post_init__(self) -> None:
        import reasoning_gym as library

        check_switch("reasoning_gym", "binary", self.binary)
        try:
            self._scorer = library.create_dataset(self.task, size=1, seed=0, **self.params).score_answer
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(
                f"reward reasoning_gym: task={self.task!r} params={dict(self.params)}: {error} "
                "(use the task and params of the data source)"
            ) from error

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order.

        Raises:
            DataError: the scorer cannot score the row's own answer either, so the row or the task is wrong.
        """
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        entry = sample.extra.get("entry") or {"question": sample.prompt, "answer": sample.answer, "metadata": {}}
        try:
            score = float(self._scorer(sample.response, entry))
        except Exception as error:
            # Scorers parse the response and raise whatever the parser raises: that is a wrong answer. A scorer that
            # fails on the true answer too is not a matter of the response.
            self._check_entry(entry, sample, error)
            score = 0.0
        correct = float(score >= CORRECT)
        return Reward(score=correct if self.binary else score, parts={"correct": correct})

    def _check_entry(self, entry: Mapping[str, Any], sample: Sample, cause: Exception) -> None:
        try:
            self._scorer(entry["answer"], entry)
        except Exception as error:
            raise DataError(
                f"reward reasoning_gym: the scorer of {self.task} fails on the answer of a row of "
                f"{sample.source or 'the data source'} itself: {type(error).__name__}: {error} "
                f"(rows of this task and params are needed; on the response: {type(cause).__name__}: {cause})"
            ) from error
