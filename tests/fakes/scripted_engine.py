"""An engine without a model: it answers as its prompts say, at the speed and with the faults of a file.

A call with the prompt [start, length] gets `length` tokens start, start + 1, ... mod 50 (fewer, and the finish reason
`length`, where the budget is shorter), the log-prob of token t is -(t + 1) / 1000, and its version is that of the last
hand-over. A prompt that begins with 99 is refused, and one that begins with 98 always fails at an engine that is well.

The folder of the engine's log holds `script.json`: {"speed": [tokens per second of a sequence, by engine],
"at_once": ...}. A file `fault-<engine>` there takes effect at the next token: `die` (the process is killed), `hang`
(neither answers nor is well), `deaf` (is well and does not answer), `errors` (every call fails), `slow`. It is about
one process: the next one of the engine removes it.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence

from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError, RequestError
from megappo.rollout.continuation import join_group, open_samples
from megappo.rollout.engine import (
    EngineSpec,
    FinishReason,
    GenerateRequest,
    GroupOutput,
    SampledResponse,
    VersionSpan,
)

REFUSED = 99
FAILS = 98
SLOW = 50.0
"""How many times slower an engine is under the fault `slow`."""


class ScriptedEngine:
    """See the module; named `tests.fakes.scripted_engine:ScriptedEngine` in rollout.engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self._name = f"engine scripted {spec.index}"
        self._folder = spec.log_path.parent
        self._fault_path = self._folder / f"fault-{spec.index}"
        script = json.loads((self._folder / "script.json").read_text())
        self._token_s = 1.0 / script["speed"][spec.index]
        self.at_once: int | None = script.get("at_once")
        self._slots = asyncio.Semaphore(self.at_once or 1000)
        self._log_path = spec.log_path
        self._index = spec.index
        self._version = 0
        self._aborted = asyncio.Event()

    async def start(self) -> None:
        self._fault_path.unlink(missing_ok=True)
        self._note(f"scripted engine of process {os.getpid()}")
        written = self._folder / f"pid-{self._index}.new"
        written.write_text(str(os.getpid()))
        written.rename(self._folder / f"pid-{self._index}")

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        if any(request.prompt_tokens[0] == REFUSED for request in requests):
            raise RequestError(f"{self._name}: generate: a prompt begins with {REFUSED}")
        if any(request.prompt_tokens[0] == FAILS for request in requests):
            raise EngineError(f"{self._name}: generate: no answer within 0 s")
        await self._meet_fault()
        if self.at_once is None:
            self._note(f"{len(requests)} groups")
        tasks = [asyncio.create_task(self._answer(request, sampling.max_new_tokens)) for request in requests]
        for task in asyncio.as_completed(tasks):
            yield await task

    async def _answer(self, request: GenerateRequest, budget: int) -> GroupOutput:
        samples = open_samples(request, budget)
        drawn = await asyncio.gather(
            *(
                self._draw(request.prompt_tokens, len(sample.begun) - sample.call_start, sample.budget)
                for sample in samples
            )
        )
        joined = {sample.sample: response for sample, response in zip(samples, drawn)}
        return join_group(request, joined, max_new_tokens=budget, version_in_use=self._version)

    async def _draw(self, prompt: list[int], begun: int, budget: int) -> SampledResponse:
        start, length = prompt[:2]
        tokens: list[int] = []
        versions: list[VersionSpan] = []
        aborted = self._aborted
        async with self._slots:
            while len(tokens) < budget and begun + len(tokens) < length and not aborted.is_set():
                await self._meet_fault()
                tokens.append((start + begun + len(tokens)) % 50)
                versions.append(VersionSpan(version=self._version, tokens=1))
        whole = begun + len(tokens) >= length
        reason = FinishReason.stop if whole else FinishReason.length if len(tokens) >= budget else FinishReason.abort
        log_probs = [-(begun + position + 1) / 1000 for position in range(len(tokens))]
        return SampledResponse(tokens=tokens, log_probs=log_probs, finish_reason=reason, versions=versions)

    async def _meet_fault(self) -> None:
        """Take the time of one token, or whatever the fault is."""
        fault = self._fault()
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in ("hang", "deaf"):
            await self._aborted.wait()
        if fault == "errors":
            raise EngineError(f"{self._name}: generate: refused with status 500: out of paper")
        await asyncio.sleep(self._token_s * (SLOW if fault == "slow" else 1.0))

    def _fault(self) -> str:
        return self._fault_path.read_text() if self._fault_path.exists() else ""

    async def abort(self) -> None:
        if self._fault() in ("hang", "deaf"):
            await asyncio.sleep(3600)
        self._aborted.set()
        self._aborted = asyncio.Event()

    async def health(self) -> None:
        if self._fault() == "hang":
            await asyncio.sleep(3600)

    async def begin_weights(self) -> None:
        if self._fault() == "errors":
            raise EngineError(f"{self._name}: begin weights: refused with status 500: out of paper")

    async def end_weights(self, version: int) -> None:
        self._version = version

    async def weight_version(self) -> int:
        return self._version

    async def sleep(self) -> None:
        self._note("sleep")

    async def wake_weights(self) -> None:
        self._note("wake_weights")

    async def wake_cache(self) -> None:
        self._note("wake_cache")

    def _note(self, text: str) -> None:
        with self._log_path.open("a") as log:
            log.write(f"{text}\n")

    async def stop(self) -> None: ...
