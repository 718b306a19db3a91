"""The record of one sample while its program runs: what was sampled and what was put between, token by token.

Invariants (asserted by tests/rollout/agents):
1. The tokens of the record are those that the engine gave, in its order, and between them those of the program; the
   engine's next prompt is the record, whatever the program thinks there is.
2. A run that repeats a record gets the same tokens again, and none of them is sampled twice.
3. A finished record ends with a sampled token, and holds no more than `max_new_tokens` tokens.
"""

import asyncio
import math
import operator
import pickle
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

from megappo.rollout.agents.program import AgentResult, OutOfTokens, ProgramError, Sampled
from megappo.rollout.engine import FinishReason, ProgramNotes, SampledResponse, Turn

Draw = Callable[[SampledResponse], Awaitable[SampledResponse]]
"""Goes on with a response whose last turn has begun; it comes back aborted where the sample is interrupted."""

_TURNS = "turns"
"""The count that every sample has."""
_NOTHING = SampledResponse(tokens=[], log_probs=[], finish_reason=FinishReason.abort, versions=[], turns=[])


class Session:
    """Answers the calls of one program, from the record first, and then from the engine."""

    def __init__(
        self, prompt_tokens: Sequence[int], begun: SampledResponse | None, *, max_new_tokens: int, draw: Draw
    ) -> None:
        """`begun`: the record of an earlier run, which was interrupted; what the engine sampled without a program is
        the first turn."""
        self._begun = _NOTHING if begun is None else replace(begun, turns=begun.calls)
        self._response = self._begun
        self._asked = 0
        """Turns that the program has asked for; the record of an earlier run may hold more."""
        self._place = 0
        """Where in the record the next of them begins."""
        self._seen = list(prompt_tokens)
        """All tokens as the program knows them."""
        self._max_new_tokens = max_new_tokens
        self._draw = draw
        self._clock = time.monotonic()
        self.is_calling = False
        """Whether a call of the program is under way."""
        self.is_running = False
        """Whether the program has been started."""

    async def generate(self, token_ids: Sequence[int], /) -> Sampled:
        """See `program.Generate`."""
        if self.is_calling:
            raise ProgramError("called generate while another call of the same sample was under way")
        added = self._added(token_ids)
        self.is_calling = True
        try:
            sampled = await self._answer(added)
        finally:
            self.is_calling = False
        self._seen += [*added, *sampled.tokens]
        return sampled

    def _added(self, token_ids: Sequence[int]) -> list[int]:
        """Return what the program has put behind the tokens that there were."""
        known = len(self._seen)
        given = _plain(token_ids)
        if given[:known] != self._seen:
            raise ProgramError(
                f"called generate with {len(token_ids)} tokens that do not begin with the {known} so far (hand over "
                "the prompt and all sampled tokens as they came, and new ones behind them)"
            )
        return given[known:]

    async def _answer(self, added: list[int]) -> Sampled:
        turns = self._response.turns or []
        turn = turns[self._asked] if self._asked < len(turns) else self._begin_turn(added)
        self._asked += 1
        self._place += turn.observed
        if turn.finish_reason is FinishReason.abort:
            self._response = await self._draw(self._response)
            turn = (self._response.turns or [])[-1]
            if turn.finish_reason is FinishReason.abort:
                raise asyncio.CancelledError("the sample is interrupted")
        start, self._place = self._place, self._place + turn.sampled
        return Sampled(
            tokens=self._response.tokens[start : self._place],
            log_probs=self._response.log_probs[start : self._place],
            finish_reason=turn.finish_reason,
        )

    def _begin_turn(self, added: list[int]) -> Turn:
        """Put what the program adds into the record."""
        before = self._response
        if len(before.tokens) + len(added) >= self._max_new_tokens:
            raise OutOfTokens(f"max_new_tokens={self._max_new_tokens} is used up")
        turn = Turn(observed=len(added), sampled=0, finish_reason=FinishReason.abort)
        self._response = replace(
            before,
            tokens=[*before.tokens, *added],
            log_probs=[*before.log_probs, *(0.0 for _ in added)],
            finish_reason=FinishReason.abort,
            turns=[*(before.turns or []), turn],
        )
        return turn

    @property
    def record(self) -> SampledResponse:
        """What there is of an interrupted sample."""
        return replace(self._response, finish_reason=FinishReason.abort, seconds=self._seconds())

    def _seconds(self) -> float:
        return self._begun.seconds + time.monotonic() - self._clock

    def finish(self, result: AgentResult) -> SampledResponse:
        """Return the finished sample, without what the program added and nobody sampled anything after, and without
        turns of an earlier run that this one has not asked for. Raises ProgramError for a result that is none."""
        counts = _counts(result)
        _require_sendable(result.extra)
        response, turns = self._response, (self._response.turns or [])[: self._asked]
        while turns and not turns[-1].sampled:
            turns.pop()
        length = sum(turn.observed + turn.sampled for turn in turns)
        reason = result.finish_reason or (turns[-1].finish_reason if turns else FinishReason.length)
        return replace(
            response,
            tokens=response.tokens[:length],
            log_probs=response.log_probs[:length],
            finish_reason=FinishReason.length if reason is FinishReason.abort else reason,
            turns=turns,
            notes=ProgramNotes(extra=result.extra, counts=counts | {_TURNS: float(len(turns))}),
            seconds=self._seconds(),
        )


def _plain(token_ids: Iterable[Any]) -> list[int]:
    """Return token ids as python integers, numpy's among them. Any: code of a user hands them over."""
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError as error:
        raise ProgramError(f"called generate with something else than token ids: {error}") from error


def _counts(result: Any) -> dict[str, float]:
    """Return the counts of a result as plain numbers. Any: code of a user returns it."""
    if not isinstance(result, AgentResult):
        raise ProgramError(f"returned {type(result).__name__} (return an AgentResult)")
    if _TURNS in result.counts:
        raise ProgramError(f"returned the count {_TURNS}, which is that of the turns of every program (rename it)")
    for name, value in result.counts.items():
        if not isinstance(value, SupportsFloat) or not math.isfinite(float(value)):
            raise ProgramError(f"returned the count {name}={value!r} (counts are finite numbers)")
    return {name: float(value) for name, value in result.counts.items()}


def _require_sendable(extra: dict[str, Any]) -> None:
    """Raise ProgramError where the reward, in another process, cannot get what a program says of its sample."""
    try:
        pickle.dumps(extra)
    except Exception as error:  # whatever objects of a user raise
        raise ProgramError(f"returned extra that cannot be sent to the reward: {error} (use plain values)") from error
