"""Generation over HTTP: requests in flight, their end before time, and the tokens that come back."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.observability.logging import get_logger
from megappo.rollout.continuation import INTERRUPT_S, join_group, no_token, open_samples
from megappo.rollout.engine import GenerateRequest, GroupOutput, SampledResponse
from megappo.rollout.generation_gate import GenerationGate
from megappo.rollout.model_folder import read_end_tokens
from megappo.rollout.sglang_client import SGLangClient
from megappo.rollout.sglang_requests import generate_body, read_answer
from megappo.rollout.stopping import StopStringFinder

_AGAIN_S = 0.05
"""An abort misses what the server is still reading, so it is repeated until everything has come back."""

logger = get_logger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    """A generate call under way."""

    tasks: list[asyncio.Task[GroupOutput]] = field(default_factory=list[asyncio.Task[GroupOutput]])
    aborted: bool = False
    began: float = field(default_factory=time.monotonic)
    interruption: asyncio.Task[None] | None = None
    """The abort at its deadline."""


class SGLangGeneration:
    """The generate half of an SGLang engine."""

    def __init__(self, client: SGLangClient, config: RolloutConfig, *, folder: Path) -> None:
        """`folder` is that of the model."""
        self._client = client
        self._config = config
        self._end_tokens = read_end_tokens(folder)
        self._stop_strings = StopStringFinder(str(folder))
        self._calls: set[_Call] = set()
        self.gate = GenerationGate()
        """Every request passes it; a hand-over may close it."""
        self._aborts = 0
        """Under way."""
        self._interruption: asyncio.Task[None] | None = None
        """The last abort at a deadline."""
        self._last_tokens = 0.0
        """When any tokens came back."""

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, version_in_use: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield each group as it finishes; what nobody waits for any more is aborted (its connection closes).

        After `rollout.request_timeout_s` everything that the server works on is aborted, as by `abort`: SGLang tells
        the ids of a prompt's samples to nobody, so that none can be aborted apart.
        """
        # More than the server can run would only wait there: a request's deadline would then count the wait, and
        # every waiting request would hold a connection.
        largest = max((request.num_samples for request in requests), default=1)
        slots = asyncio.Semaphore(max(1, 2 * self._config.sglang.max_running_requests // largest))
        call = _Call()

        async def sample(request: GenerateRequest) -> GroupOutput:
            async with slots:
                drawn = await self._draw_when_open(request, sampling, call)
            return join_group(request, drawn, max_new_tokens=sampling.max_new_tokens, version_in_use=version_in_use)

        call.tasks = [asyncio.create_task(sample(request)) for request in requests]
        self._calls.add(call)
        deadline = asyncio.get_running_loop().call_later(self._config.request_timeout_s, self._interrupt, call)
        try:
            for finished in asyncio.as_completed(call.tasks):
                output = await finished
                await self._require_progress(call)
                yield output
        finally:
            deadline.cancel()
            self._calls.discard(call)
            for task in call.tasks:
                task.cancel()
            await asyncio.gather(*call.tasks, return_exceptions=True)

    def _interrupt(self, call: _Call) -> None:
        """End what is under way, at the deadline of a call."""
        if self._interruption is None or self._interruption.done():
            timeout_s = self._config.request_timeout_s
            logger.warning(
                "rollout.request_timeout_s=%g is over; what is unfinished goes on in another call", timeout_s
            )
            self._interruption = asyncio.create_task(self.abort())
        call.interruption = self._interruption

    async def _require_progress(self, call: _Call) -> None:
        """Raise EngineError where the server sampled nothing, for any call, from the begin of this one to its deadline:
        to ask for the same once more would not help."""
        if call.interruption is None:
            return
        await call.interruption
        if self._last_tokens < call.began:
            raise await self._client.failure("generate", no_token(self._config))

    async def _draw_when_open(
        self, request: GenerateRequest, sampling: SamplingConfig, call: _Call
    ) -> dict[int, SampledResponse]:
        """Draw the open samples of a request, after a hand-over that holds the gate and after an abort of others, which
        would hit this request, too; none if the call is aborted before."""
        while not call.aborted:
            if not self._aborts and self.gate.is_open:
                async with self.gate.passing():
                    return await self._draw(request, sampling)
            await asyncio.sleep(_AGAIN_S)
        return {}

    async def _draw(self, request: GenerateRequest, sampling: SamplingConfig) -> dict[int, SampledResponse]:
        """Draw the open samples of a request."""
        samples = open_samples(request, sampling.max_new_tokens)
        if not samples:
            return {}
        body = generate_body(request, samples, sampling, end_tokens=self._end_tokens)
        body["extra_key"] = str(self.gate.epoch)  # only what the same weights computed is taken from the cache
        timeout_s = self._config.request_timeout_s + INTERRUPT_S
        answer = await self._client.call("generate", "POST", "/generate", body, timeout_s)
        ends = [*self._end_tokens, *sampling.stop_token_ids]
        drawn = read_answer(answer, samples, end_tokens=ends, strings=self._stop_strings.of(sampling.stop))
        if any(response.tokens for response in drawn.values()):
            self._last_tokens = time.monotonic()
        return drawn

    async def abort(self) -> None:
        """End what is under way; returns once it has come back with its tokens."""
        calls = list(self._calls)
        for call in calls:
            call.aborted = True
        self._aborts += 1
        try:
            pending = {task for call in calls for task in call.tasks if not task.done()}
            while pending:
                await self._client.abort_requests(timeout_s=INTERRUPT_S)
                _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        finally:
            self._aborts -= 1
