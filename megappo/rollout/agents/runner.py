"""Runs rollout programs beside an engine, and gives back what the engine itself would give: groups of responses."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.data.types import Prompt
from megappo.errors import EngineError, MegappoError
from megappo.observability.logging import get_logger
from megappo.rollout.agents.engine_calls import EngineCalls
from megappo.rollout.agents.program import AgentResult, AgentTask, OutOfTokens, ProgramError, RolloutProgram
from megappo.rollout.agents.session import Session
from megappo.rollout.engine import FinishReason, GenerateRequest, Generation, GroupOutput, SampledResponse

_AGAIN_S = 0.05
"""Between two looks at what has not ended after it was told to."""

logger = get_logger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """A generate call under way."""

    calls: EngineCalls
    sessions: dict[asyncio.Task[SampledResponse], Session] = field(
        default_factory=dict[asyncio.Task[SampledResponse], Session]
    )
    began: float = field(default_factory=time.monotonic)
    interruption: asyncio.Task[None] | None = None
    """Its end at the deadline."""

    def cancel_what_computes(self) -> list[asyncio.Task[SampledResponse]]:
        """Cancel the programs that are not in a call to the engine; returns those that have not ended."""
        left = {task: session for task, session in self.sessions.items() if not task.done()}
        for task, session in left.items():
            if session.is_running and not session.is_calling:
                task.cancel()
        return list(left)


class AgentRunner:
    """`generate` and `abort` of an engine, where each sample is made by a program. For one event loop."""

    def __init__(self, engine: Generation, program: RolloutProgram, config: RolloutConfig) -> None:
        self._engine = engine
        self._program = program
        self._config = config
        self._calls: set[_Call] = set()
        self._last_tokens = 0.0
        """When any tokens came back."""

    async def generate(
        self, requests: Sequence[GenerateRequest], prompts: Sequence[Prompt], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield each group as its programs finish; see `RolloutEngine.generate`. After `rollout.request_timeout_s` all
        programs are interrupted, to be run again in another call.

        Args:
            prompts: that of each request.

        Raises:
            EngineError: the engine failed, or the call met its deadline without a token.
            ProgramError: a program failed.
        """
        call = _Call(calls=EngineCalls(self._engine, requests, sampling, seed=seed, progressed=self._note_progress))
        self._calls.add(call)
        groups = [
            asyncio.create_task(self._group(call, position, request, prompt, sampling.max_new_tokens))
            for position, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        deadline = asyncio.get_running_loop().call_later(self._config.request_timeout_s, self._interrupt, call)
        try:
            for finished in asyncio.as_completed(groups):
                output = await finished
                if call.interruption is not None:
                    await self._require_progress(call, call.interruption)
                yield output
        finally:
            deadline.cancel()
            self._calls.discard(call)
            for task in [*groups, *call.sessions]:
                task.cancel()
            await asyncio.gather(*groups, *call.sessions, return_exceptions=True)
            await call.calls.cancel()

    def _note_progress(self) -> None:
        self._last_tokens = time.monotonic()

    async def _group(
        self, call: _Call, position: int, request: GenerateRequest, prompt: Prompt, max_new_tokens: int
    ) -> GroupOutput:
        """Run the programs of one group."""
        begun = request.begun or [None] * request.num_samples
        tasks: list[asyncio.Task[SampledResponse]] = []
        for number, response in enumerate(begun):
            if response is not None and response.finish_reason is not FinishReason.abort and response.notes is not None:
                tasks.append(asyncio.create_task(_as_it_is(response)))
                call.calls.program_ended()
                continue
            session = Session(
                request.prompt_tokens,
                response,
                max_new_tokens=max_new_tokens,
                draw=partial(call.calls.draw, position, number),
            )
            task = AgentTask(prompt=prompt, number=number, spent_s=0.0 if response is None else response.seconds)
            tasks.append(asyncio.create_task(self._sample(call, session, task)))
            call.sessions[tasks[-1]] = session
        responses = await asyncio.gather(*tasks)
        versions = [span.version for response in responses for span in response.versions]
        version = min(versions) if versions else call.calls.version_in_use
        return GroupOutput(
            group_id=request.group_id,
            responses=list(responses),
            policy_version=await self._engine.weight_version() if version is None else version,
        )

    async def _sample(self, call: _Call, session: Session, task: AgentTask) -> SampledResponse:
        """Run one program to its end, or until the call is stopped."""
        session.is_running = True
        try:
            return session.finish(await self._program.run(task, session.generate))
        except OutOfTokens:
            return session.finish(AgentResult(finish_reason=FinishReason.length))
        except asyncio.CancelledError:
            if not call.calls.closed:
                raise
            return session.record
        except ProgramError as error:
            raise self._blame(task, str(error)) from error
        except MegappoError:
            raise
        except Exception as error:  # code of a user: the boundary of his part and ours
            logger.exception("the program of data row %d failed", task.prompt.row)
            raise self._blame(task, f"{type(error).__name__}: {error} (its log has the traceback)") from error
        finally:
            call.calls.program_ended()

    def _blame(self, task: AgentTask, what: str) -> ProgramError:
        row = f"{task.prompt.source} row {task.prompt.row}".strip()
        return ProgramError(f"rollout.agent={self._config.agent}: {row}: {what}")

    def _interrupt(self, call: _Call) -> None:
        """Stop a call at its deadline."""
        logger.warning(
            "rollout.request_timeout_s=%g is over; what is unfinished goes on in another call",
            self._config.request_timeout_s,
        )
        call.interruption = asyncio.create_task(self._stop([call]))

    async def _require_progress(self, call: _Call, interruption: asyncio.Task[None]) -> None:
        """Raise EngineError where the engine has sampled nothing, for any call, since this one began: to ask for the
        same once more would not help."""
        await interruption
        if self._last_tokens < call.began:
            raise EngineError(
                f"generate: not one token within rollout.request_timeout_s={self._config.request_timeout_s:g} (raise "
                "it if prompts alone, or what the program does before its next call, take longer)"
            )

    async def abort(self) -> None:
        """Interrupt all programs; their calls yield what they have. See `RolloutEngine.abort`."""
        await self._stop(list(self._calls))

    async def _stop(self, calls: Sequence[_Call]) -> None:
        """What is in a call to the engine ends when that comes back, anything else at once."""
        for call in calls:
            call.calls.close()
            call.cancel_what_computes()
        await self._engine.abort()
        # A call that came back in the meantime may have been the last of its program, or let it go on with something.
        while left := [task for call in calls for task in call.cancel_what_computes()]:
            await asyncio.wait(left, timeout=_AGAIN_S)


async def _as_it_is(response: SampledResponse) -> SampledResponse:
    return response
