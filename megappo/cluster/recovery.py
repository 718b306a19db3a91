"""What happens to engines that fail: killed, started anew after a wait, given the weights, and only then used again.

One event loop calls everything here. A failure is told in one line; the run ends when no engine is left, or at the
first failure where `rollout.recovery.max_restarts` is 0.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError

from megappo.cluster.engine_keeper import EngineKeeper, EngineState
from megappo.config.run import RunConfig
from megappo.errors import EngineError, MegappoError
from megappo.observability.logging import get_logger
from megappo.rollout.usage import UsageMeter

logger = get_logger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], None]
"""Runs a coroutine in the background; an exception that leaves it ends the run."""


class EngineUser(Protocol):
    """Who is told of engines that come and go."""

    def engine_left(self, index: int) -> int:
        """An engine takes no more prompts; returns how many groups it had."""
        ...

    def engine_is_fresh(self, index: int) -> None:
        """An engine waits for its weights."""
        ...

    def engine_serves(self, index: int) -> None:
        """An engine takes prompts."""
        ...

    def has_groups(self, index: int) -> bool:
        """Whether an engine has prompts."""
        ...

    def time_passed(self) -> None:
        """Look for engines that have become slow."""
        ...

    def end(self, error: MegappoError) -> None:
        """Nothing can be generated any more."""
        ...


class EngineRecovery:
    """The states of all engines."""

    def __init__(
        self,
        config: RunConfig,
        keepers: Sequence[EngineKeeper],
        *,
        meter: UsageMeter,
        note: Callable[[str], None],
        spawn: Spawn,
    ) -> None:
        self._config = config
        self._limits = config.rollout.recovery
        self._keepers = keepers
        self._meter = meter
        self._note = note
        self._spawn = spawn
        self._failed_at: dict[int, float] = {}
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._changed = asyncio.Event()
        self.broken: MegappoError | None = None
        """Why nothing can be generated any more."""
        self.user: EngineUser

    def started(self, index: int, at_once: int | None) -> None:
        """Note that an engine answers. It waits for its weights."""
        keeper = self._keepers[index]
        keeper.at_once, keeper.state = at_once, EngineState.fresh
        self._tell_waiting()
        self.user.engine_is_fresh(index)

    def admit(self, indices: Iterable[int]) -> None:
        """Let engines that have the weights of the last hand-over take prompts."""
        for keeper in (self._keepers[index] for index in indices):
            if keeper.state not in (EngineState.fresh, EngineState.fetching):
                continue
            keeper.state = EngineState.serving
            if (since := self._failed_at.pop(keeper.index, None)) is not None:
                seconds = time.monotonic() - since
                self._meter.recovered(seconds)
                self._say(f"{keeper.name} takes prompts again, {seconds:.1f} s after its failure was found")
            self._spawn(self._watch(keeper, keeper.life))
            self.user.engine_serves(keeper.index)

    def fail(self, index: int, error: MegappoError, *, life: int) -> None:
        """Take an engine out of service and start it anew, or end the run. Nothing happens where `life` is over: what
        failed then has been replaced."""
        keeper = self._keepers[index]
        if keeper.life != life or self.broken is not None:
            return
        logger.warning("%s", error)
        keeper.kill()
        groups = self.user.engine_left(index)
        self._failed_at.setdefault(index, time.monotonic())
        reason = str(error).splitlines()[0]
        restart, limit = keeper.count_restart(), self._limits.max_restarts
        if restart is not None:
            self._meter.count_restart()
            delay_s = min(self._limits.backoff_s * 2 ** (restart - 1), self._limits.max_backoff_s)
            moved = f"; its {groups} unfinished groups go on elsewhere or after its restart" if groups else ""
            self._say(f"{reason}{moved}; restart {restart} of {limit} in {delay_s:g} s")
            self._spawn(self._restart(keeper, delay_s))
            return
        keeper.state = EngineState.lost
        if limit > 0:
            self._say(f"{reason}; given up after {limit} restarts within an hour")
        if limit == 0 or all(other.state is EngineState.lost for other in self._keepers):
            self.broken = EngineError(f"no rollout engine is left: {error}") if limit > 0 else error
            self._tell_waiting()
            self.user.end(self.broken)

    async def _restart(self, keeper: EngineKeeper, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._may_start.wait()
        keeper.launch()
        life = keeper.life
        try:
            keeper.place = await asyncio.wait_for(keeper.call("identity").ref, self._config.cluster.start_timeout_s)
            # The engine's own deadline comes first and says more.
            timeout_s = self._config.rollout.start_timeout_s + 30.0
            at_once = await asyncio.wait_for(keeper.call("start").ref, timeout_s)
        except (RayError, TimeoutError) as error:
            self.fail(keeper.index, keeper.failure(error, "restart"), life=life)
            return
        if keeper.life == life:
            self.started(keeper.index, at_once)

    async def _watch(self, keeper: EngineKeeper, life: int) -> None:
        """Ask an engine that has prompts, at every interval, whether it is well. One bad answer is no failure: it has
        until `hang_timeout_s` to give a good one."""
        well = time.monotonic()
        while True:
            await asyncio.sleep(self._limits.health_interval_s)
            if keeper.life != life:
                return
            self.user.time_passed()
            if not self.user.has_groups(keeper.index):
                well = time.monotonic()
                continue
            left_s = well + self._limits.hang_timeout_s - time.monotonic()
            try:
                await asyncio.wait_for(keeper.call("health").ref, max(left_s, 0.1))
                well = time.monotonic()
            except (RayError, TimeoutError) as error:
                late = time.monotonic() - well >= self._limits.hang_timeout_s
                if late or isinstance(error, RayActorError):
                    self.fail(keeper.index, self._describe_illness(keeper, error), life=life)
                    return
                logger.warning("%s is not well: %s", keeper.name, error)

    def _describe_illness(self, keeper: EngineKeeper, error: Exception) -> MegappoError:
        if isinstance(error, TimeoutError):
            error = TimeoutError(
                f"no answer within {self._limits.hang_timeout_s:g} s (rollout.recovery.hang_timeout_s)"
            )
        return keeper.failure(error, "health check")

    async def is_well(self, index: int) -> bool:
        """Ask one engine now."""
        try:
            await asyncio.wait_for(self._keepers[index].call("health").ref, self._limits.hang_timeout_s)
        except (RayError, TimeoutError):
            return False
        return True

    async def wait_in_service(self) -> None:
        """Return when an engine can take part in a hand-over. Raises EngineError when none ever will."""
        while self.broken is None and not any(keeper.in_service for keeper in self._keepers):
            self._changed.clear()
            await self._changed.wait()
        if self.broken is not None:
            raise self.broken

    def allow_starts(self, allowed: bool) -> None:
        """Hold restarts back while another role has the devices."""
        if allowed:
            self._may_start.set()
        else:
            self._may_start.clear()

    def _tell_waiting(self) -> None:
        self._changed.set()

    def _say(self, line: str) -> None:
        logger.warning("%s", line)
        self._note(line)
