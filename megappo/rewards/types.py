"""The reward port: samples in, rewards out."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelScore:
    """What the run's reward model says of a sample."""

    score: float | None
    """None: it cannot score the text."""
    problem: str = ""
    """Why there is no score."""


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
    reward: str = ""
    """Name of the source whose reward scores it; empty: the run's."""
    response_tokens: int = 0
    """Sampled tokens, the end token included."""
    model_score: ModelScore | None = None
    """Of the run's reward model; None: it is not asked for this sample."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Reward:
    """The score and, by name, its parts (each becomes the metric `reward/<part>/mean`)."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    extracted: str | None = None
    """The answer that was read out of the response, in a form in which equal texts are the same answer, for
    `validation.majority`; empty: the response holds none; None: this reward does not say."""
    failure: str | None = None
    """Why there is no score (a FailureKind): `score` is then what `reward.on_failure` says, NaN where that is no score.
    Reward functions leave it alone: they raise."""


class RewardFunction(Protocol):
    """Scores a batch of samples, in order: one Reward or number each. Raises to say that it cannot. `score` may be a
    coroutine function (`async def`)."""

    def score(self, samples: Sequence[Sample]) -> Sequence[Reward | float] | Awaitable[Sequence[Reward | float]]: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class CallLimit:
    """How long one call of a reward may take by its own parameters; `reward.timeout_s` must be longer, or it would end
    calls that the reward has not given up."""

    seconds: float
    param: str
    """The parameter to lower."""
    beside: str = ""
    """Others that count, with their values."""


@runtime_checkable
class LimitsItself(Protocol):
    """A reward that ends its calls by itself."""

    @property
    def call_limit(self) -> CallLimit: ...


class FailureKind(StrEnum):
    """Why a sample has no score; each is the metric `reward/failed/<kind>`."""

    raised = "raised"
    """The reward raised an exception."""
    timed_out = "timed_out"
    """It did not answer within `reward.timeout_s`."""
    died = "died"
    """Its process ended."""
    none = "none"
    """It returned None."""
    not_finite = "not_finite"
    """It returned NaN or an infinity, as the score or a part."""
    wrong_length = "wrong_length"
    """It returned more or fewer rewards than it was given samples."""
    wrong_type = "wrong_type"
    """It returned something else than a number or a Reward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """What happened to one sample that has no score."""

    kind: FailureKind
    message: str
    """One line: which reward, what happened."""
    cause: str = ""
    """Class of the exception that it raised."""
    details: str = ""
    """The traceback, or where it hung."""
    refused: bool = False
    """Whether the reward refused the sample or its data row (a DataError): asking again does not help."""

    @property
    def key(self) -> str:
        """What the log calls the same failure: it tells of the first of each in full."""
        return f"{self.kind} {self.cause}".rstrip()


def answer_of(sample: Sample) -> str:
    """Return the ground truth. Raises DataError when the row has none."""
    if sample.answer is None:
        raise DataError(
            f"reward: a row of {sample.source or 'the data source'} has no answer, prompt {sample.prompt!r:.200} "
            "(set answer_column, or use a reward that needs none)"
        )
    return sample.answer
