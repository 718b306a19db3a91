"""How a reward function is called: one sample or a batch, plain or async; what it may return."""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from megappo.errors import DataError, MegappoError
from megappo.rewards.types import Failure, FailureKind, Reward, Sample

Outcome = Reward | Failure

_LONGEST_MESSAGE = 1000
_LONGEST_DETAILS = 20_000
"""Characters; exceptions may hold whole answers."""
_RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""What is caught at the boundary to foreign code: whatever it raises is told of."""


@dataclass(kw_only=True, slots=True)
class Caller:
    """Where plain functions run: in the calling thread, or in one of several threads while others go on.

    The main thread is the better place where one sample is scored at a time: there a library may use signals.
    """

    threads: Executor | None = None
    running: set[Future[Any]] = field(default_factory=set[Future[Any]])  # Any: whatever a reward returns
    """Calls in threads that have not ended. Nothing can end a thread from outside."""

    # Any: whatever a reward takes and returns.
    async def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Return what the function returns for the argument; awaits what is to be awaited."""
        if self.threads is None or _is_async(function):
            result = function(argument)
        else:
            thread_call = self.threads.submit(function, argument)
            self.running.add(thread_call)
            thread_call.add_done_callback(self.running.discard)
            result = await asyncio.wrap_future(thread_call)
        return await result if inspect.isawaitable(result) else result


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _pass_on_own_end(error: BaseException) -> None:
    """Raise an error that ends the call from outside (it is late) and is none that the reward raised by itself."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def _is_listed(results: object) -> TypeGuard[Iterable[object]]:
    no_list = str | bytes | Reward | Real | Mapping | Set
    # Arrays and tensors of no dimension have no length, though their class does.
    return hasattr(results, "__len__") and not isinstance(results, no_list) and getattr(results, "ndim", 1) > 0


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as fault:  # of foreign code, too
        return f"(its text cannot be had: {type(fault).__name__})"


@dataclass(kw_only=True, slots=True, frozen=True)
class Term:
    """One reward function, what it is called in messages, and its weight in the score."""

    label: str
    """For messages: `reward numeric`, `reward term format (regex)`."""
    weight: float = 1.0
    score: Callable[[Sequence[Sample]], Any] | None = None
    """Scores a batch (Any: a sequence of Reward or numbers, or an awaitable of one)."""
    score_one: Callable[[Sample], Any] | None = None
    """Scores one sample, where `score` is None (Any: a Reward or a number, or an awaitable of one)."""
    require_stop: bool = False
    """A response that did not end by itself scores 0."""

    async def outcomes(self, samples: Sequence[Sample], caller: Caller) -> list[Outcome]:
        """Return what became of every sample, in order; never raises what the reward raises."""
        found = await (self._score_batch(samples, caller) if self.score else self._score_each(samples, caller))
        if not self.require_stop:
            return found
        return [
            replace(outcome, score=0.0) if isinstance(outcome, Reward) and sample.finish_reason != "stop" else outcome
            for sample, outcome in zip(samples, found, strict=True)
        ]

    async def _score_batch(self, samples: Sequence[Sample], caller: Caller) -> list[Outcome]:
        assert self.score is not None
        try:
            return self._checked_batch(await caller.call(self.score, samples), samples)
        except _RAISED as error:
            _pass_on_own_end(error)
            return [self._raised(error)] * len(samples)

    def _checked_batch(self, results: object, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the results as one Reward each; whatever has no order, or no length, is no list of them."""
        if not _is_listed(results):
            kind = FailureKind.none if results is None else FailureKind.wrong_type
            return [self._failure(kind, f"returned {results!r:.100} for a batch, no list of rewards")] * len(samples)
        listed = list(results)
        if len(listed) != len(samples):
            text = f"{len(listed)} rewards for {len(samples)} samples (one each is needed)"
            return [self._failure(FailureKind.wrong_length, text)] * len(samples)
        return [self._checked(result, sample) for result, sample in zip(listed, samples)]

    async def _score_each(self, samples: Sequence[Sample], caller: Caller) -> list[Outcome]:
        assert self.score_one is not None
        found: list[Outcome] = []
        for sample in samples:
            try:
                found.append(self._checked(await caller.call(self.score_one, sample), sample))
            except _RAISED as error:
                _pass_on_own_end(error)
                found.append(self._raised(error))
        return found

    def _checked(self, result: object, sample: Sample) -> Outcome:
        """Return the result as a Reward of plain floats."""
        if result is None:
            return self._failure(FailureKind.none, f"returned None for the response {sample.response!r:.200}")
        reward = result if isinstance(result, Reward) else Reward(score=result)  # type: ignore[arg-type]  # checked next
        if not isinstance(reward.parts, dict):  # type: ignore[reportUnnecessaryIsInstance]  # of foreign code
            return self._failure(FailureKind.wrong_type, f"parts {reward.parts!r:.100} are no dict of numbers by name")
        if not isinstance(reward.extracted, str | None):  # type: ignore[reportUnnecessaryIsInstance]  # as above
            return self._failure(FailureKind.wrong_type, f"extracted {reward.extracted!r:.100} is no text")
        numbers = {"score": reward.score} | {f"part {name}": value for name, value in reward.parts.items()}
        for name, value in numbers.items():
            if not isinstance(value, Real | np.bool_):
                return self._failure(
                    FailureKind.wrong_type,
                    f"{name} {value!r:.100} of type {type(value).__name__} is no number (return a float or a Reward)",
                )
            if not np.isfinite(float(value)):
                text = f"{name} {value} is not finite, response {sample.response!r:.200}"
                return self._failure(FailureKind.not_finite, text)
        parts = {str(name): float(value) for name, value in reward.parts.items()}
        # A new one: the process that asks may not know a class of the reward's own.
        extracted = None if reward.extracted is None else str(reward.extracted)
        return Reward(score=float(reward.score), parts=parts, extracted=extracted)

    def _raised(self, error: BaseException) -> Failure:
        told = isinstance(error, MegappoError)
        text = str(error) if told else f"{self.label}: raised {type(error).__name__}: {_text_of(error)}"
        details = "".join(traceback.format_exception(error))
        return Failure(
            kind=FailureKind.raised,
            message=text[:_LONGEST_MESSAGE],
            cause=type(error).__name__,
            details=details[-_LONGEST_DETAILS:],
            refused=isinstance(error, DataError),
        )

    def _failure(self, kind: FailureKind, text: str) -> Failure:
        return Failure(kind=kind, message=f"{self.label}: {text}")
