"""An event loop in a thread of its own, and what other threads ask of it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from megappo.errors import EngineError
from megappo.observability.logging import get_logger
from megappo.observability.waiting import Wait

logger = get_logger(__name__)

T = TypeVar("T")

BUSY_S = 60.0
"""Longest wait for the loop itself, which nothing keeps for long."""


def give_up(wait: Wait) -> None:
    """End a wait for engines whose time is up, unless it is to go on. Raises EngineError."""
    verdict = wait.is_given_up()
    if not verdict.goes_on:
        raise EngineError(f"{wait.phase}: nothing came of the engines within {wait.limit_s:.0f} s{verdict.told}")


class LoopThread:
    """See the module.

    Args:
        failed: is told, on the loop, what a coroutine of `spawn` raised.
        outstanding: says, from any thread, what calls of `wait` may wait for.
    """

    def __init__(
        self, name: str, *, failed: Callable[[BaseException], None], outstanding: Callable[[], Sequence[str]]
    ) -> None:
        self._name = name
        self._failed = failed
        self._outstanding = outstanding
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to run what was and is asked."""
        threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, from the loop."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function on the loop and return its result."""

        async def run() -> T:
            return work()

        return self.wait(run(), phase=self._name, limit_s=BUSY_S)

    def wait(self, work: Coroutine[Any, Any, T], *, phase: str, limit_s: float) -> T:
        """Return the result of a coroutine, whose own limits come before `limit_s`."""
        result = asyncio.run_coroutine_threadsafe(work, self._loop)
        with Wait(phase=phase, outstanding=self._outstanding, limit_s=limit_s) as wait:
            while True:
                try:
                    return result.result(wait.left_s)
                except TimeoutError:
                    if result.done():  # the coroutine's own
                        raise
                    give_up(wait)

    def stop(self) -> None:
        """End everything that runs, and the thread; does not wait for it."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()
