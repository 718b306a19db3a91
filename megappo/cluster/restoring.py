"""Engines that were started anew get the weights of the last hand-over, while others generate.

Each in a thread of its own: it may have to wait until the trainer is free, and the other engines go on meanwhile. Only
while something is generated: else it waits for the next hand-over, which is to all engines.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread

from megappo.cluster.engine_keeper import EngineKeeper, EngineState
from megappo.cluster.recovery import EngineRecovery, Spawn
from megappo.errors import EngineError, MegappoError

Restore = Callable[[int, Callable[[], bool]], bool]
"""Brings an engine to the weights of the last hand-over, unless it is told, once it could, that they are not wanted any
more. Returns whether the engine has them; raises EngineError, or another MegappoError where the trainer failed."""


class WeightRestorer:
    """Brings fresh engines into service. One event loop calls everything but `restore`."""

    def __init__(
        self,
        keepers: Sequence[EngineKeeper],
        *,
        recovery: EngineRecovery,
        spawn: Spawn,
        is_generating: Callable[[], bool],
        trainer_failed: Callable[[MegappoError], None],
    ) -> None:
        """`is_generating` is asked from any thread."""
        self._keepers = keepers
        self._recovery = recovery
        self._spawn = spawn
        self._is_generating = is_generating
        self._trainer_failed = trainer_failed
        self.restore: Restore = lambda engine, still_wanted: still_wanted()

    def begin(self) -> None:
        """Begin to give weights to all engines that wait for some, if anything is generated."""
        for keeper in self._keepers:
            if keeper.state is EngineState.fresh and self._is_generating():
                keeper.state = EngineState.fetching
                self._spawn(self._bring_back(keeper, keeper.life))

    async def _bring_back(self, keeper: EngineKeeper, life: int) -> None:
        """Give one engine its weights. What fails at the trainer is no fault of the engine's, which goes on waiting."""

        def is_fetching() -> bool:
            return keeper.life == life and keeper.state is EngineState.fetching

        def restore() -> bool:
            return self.restore(keeper.index, lambda: is_fetching() and self._is_generating())

        try:
            given = await _in_thread(restore, name=f"restore-{keeper.index}")
        except EngineError as error:
            self._recovery.fail(keeper.index, error, life=life)
            return
        except MegappoError as error:
            self._trainer_failed(error)
            given = False
        if given:
            self._recovery.admit({keeper.index: life})
        elif is_fetching():
            keeper.state = EngineState.fresh
            self.begin()


async def _in_thread(work: Callable[[], bool], *, name: str) -> bool:
    """Return what a blocking call returns, or raise what it raises. The thread is a daemon: one of an executor would
    keep the process until the call ends."""
    result = Future[bool]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised where it is awaited
            result.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(result)
