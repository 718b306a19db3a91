"""A gate that requests pass on their way to an engine, so that a hand-over can wait until none is under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class GenerationGate:
    """Counts the requests under way; closed, it keeps new ones waiting. For one event loop."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0
        self.epoch = 0
        """Raised whenever the weights change: prefixes cached in one epoch are of no use in another."""

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and be under way inside the block."""
        while not self._opened.is_set():  # it may have closed again before this task ran
            await self._opened.wait()
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle.set()

    @property
    def is_open(self) -> bool:
        """Whether a request would pass at once."""
        return self._opened.is_set()

    def close(self) -> None:
        """Let nothing new pass."""
        self._opened.clear()

    def open(self) -> None:
        """Let everything pass, to new weights."""
        self.epoch += 1
        self._opened.set()

    async def drained(self) -> None:
        """Return once nothing is under way."""
        await self._idle.wait()
