"""The reward port: samples in, rewards out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One response to be scored."""

    prompt: str
    """Prompt text as the model saw it."""
    response: str
    """Response text without its end token."""
    answer: str | None
    """Ground truth of the data row."""
    finish_reason: str = "stop"
    """stop, length or abort."""
    source: str = ""
    """Name of the data source."""
    # Any: extra columns of the data row, for the reward that knows them.
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, frozen=True)
class Reward:
    """The score and, by name, its parts (each becomes the metric `reward/<part>/mean`)."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Scores a batch of samples, in order. Raises to say that it cannot; a wrong length is an error."""

    def score(self, samples: Sequence[Sample]) -> list[Reward]: ...


def answer_of(sample: Sample) -> str:
    """Return the ground truth. Raises DataError when the row has none."""
    if sample.answer is None:
        raise DataError(
            f"reward: a row of {sample.source or 'the data source'} has no answer, prompt {sample.prompt!r:.200} "
            "(set answer_column, or use a reward that needs none)"
        )
    return sample.answer
