"""Generation that begins while new weights are handed over waits for their end."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from megappo.config.rollout import SamplingConfig
from megappo.rollout.engine import GenerateRequest, Generation, GroupOutput


class HeldGeneration:
    """The half of an engine that samples. What is under way when a hand-over begins is the engine's business (its
    `PauseMode`); what comes meanwhile, from a loop that samples beside it, is held here: the engine would refuse it, as
    it must after a hand-over that failed."""

    def __init__(self, engine: Generation) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        self._open.set()

    @property
    def at_once(self) -> int | None:
        """As the engine's."""
        return self._engine.at_once

    def hold(self) -> None:
        """Let nothing new begin, until `release`. After a hand-over that failed it stays so: the next one ends well, or
        the engine is given up."""
        self._open.clear()

    def release(self) -> None:
        """Let everything begin."""
        self._open.set()

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield as the engine does, once no hand-over is open."""
        while not self._open.is_set():  # it may be held again before this task runs
            await self._open.wait()
        async for output in self._engine.generate(requests, sampling, seed=seed):
            yield output

    async def abort(self) -> None:
        """End what the engine works on; what is held begins later, and is ended by a later call."""
        await self._engine.abort()

    async def weight_version(self) -> int:
        """As the engine's."""
        return await self._engine.weight_version()
