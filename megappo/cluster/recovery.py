"""What happens to engines that fail: killed, started anew after a wait, given the weights, and only then used again.

One event loop calls everything here. A failure is told in one line; the run ends when no engine is left, or at the
first failure where `rollout.recovery.max_restarts` is 0.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError

from megappo.cluster.engine_keeper import EngineKeeper, EngineState
from megappo.config.run import RunConfig
from megappo.errors import EngineError, MegappoError
from megappo.observability.logging import get_logger
from megappo.observability.waiting import Wait
from megappo.rollout.usage import UsageMeter

logger = get_logger(__name__)

_ANSWER_S = 30.0
"""What an answer may take over the engine's own deadline, which comes first and says more."""

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
        self._last_failure = "no engine was started"
        self.broken: MegappoError | None = None
        """Why nothing can be generated any more."""
        self.user: EngineUser

    def started(self, index: int, at_once: int | None) -> None:
        """Note that an engine answers. It waits for its weights."""
        keeper = self._keepers[index]
        keeper.at_once, keeper.state = at_once, EngineState.fresh
        self._tell_waiting()
        self.user.engine_is_fresh(index)

    def admit(self, lives: Mapping[int, int]) -> None:
        """Let engines that have the weights of the last hand-over take prompts, where the process that got them is
        still there."""
        for index, life in lives.items():
            keeper = self._keepers[index]
            if keeper.life != life or keeper.state not in (EngineState.fresh, EngineState.fetching):
                continue
            keeper.state = EngineState.serving
            if (since := self._failed_at.pop(keeper.index, None)) is not None:
                seconds = time.monotonic() - since
                self._meter.recovered(seconds)
                self._say(f"{keeper.name} takes prompts again, {seconds:.1f} s after its failure was found")
            self._spawn(self._watch(keeper, life))
            self.user.engine_serves(keeper.index)

    def fail(self, index: int, error: MegappoError, *, life: int) -> None:
        """Take an engine out of service and start it anew, or end the run. Nothing happens where `life` is over or the
        engine is down already: what failed then has been or will be replaced."""
        keeper = self._keepers[index]
        if keeper.life != life or keeper.state in (EngineState.down, EngineState.lost) or self.broken is not None:
            return
        logger.warning("%s", error)
        keeper.kill()
        groups = self.user.engine_left(index)
        self._failed_at.setdefault(index, time.monotonic())
        reason = self._last_failure = str(error).splitlines()[0]
        self._tell_waiting()
        restart, limit = keeper.count_restart(), self._limits.max_restarts
        if restart is not None:
            self._meter.count_restart()
            delay_s = self._backoff_s(restart)
            moved = f"; its {groups} unfinished groups go on elsewhere or after its restart" if groups else ""
            self._say(f"{reason}{moved}; restart {restart} of {limit} in {delay_s:g} s")
            self._spawn(self._restart(keeper, delay_s))
            return
        keeper.state = EngineState.lost
        if limit > 0:
            self._say(f"{reason}; given up after {limit} restarts within an hour")
        if limit == 0 or all(other.state is EngineState.lost for other in self._keepers):
            self.broken = EngineError(f"no rollout engine is left: {error}") if limit > 0 else error
            self.user.end(self.broken)

    async def _restart(self, keeper: EngineKeeper, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while not self._may_start.is_set():  # it may be cleared again before this goes on
            await self._may_start.wait()
        keeper.launch()
        life = keeper.life
        try:
            keeper.place = await asyncio.wait_for(keeper.call("identity").ref, self._config.cluster.start_timeout_s)
            timeout_s = self._config.rollout.start_timeout_s + _ANSWER_S
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
                well = keeper.well_at = time.monotonic()
            except (RayError, TimeoutError) as error:
                late = time.monotonic() - well >= self._limits.hang_timeout_s
                if late or isinstance(error, RayActorError):
                    # Before its process is killed, which nobody could look at any more.
                    told = await self._report_hang(keeper, well) if isinstance(error, TimeoutError) else ""
                    self.fail(keeper.index, self._describe_illness(keeper, error, told), life=life)
                    return
                logger.warning("%s is not well: %s", keeper.name, error)

    async def _report_hang(self, keeper: EngineKeeper, well: float) -> str:
        """Have the watchdog look at an engine; returns what it says, to be added to an error."""
        wait = Wait(
            phase="health check",
            outstanding=lambda: [keeper.name],
            limit_s=self._limits.hang_timeout_s,
            key="rollout.recovery.hang_timeout_s",
            since=well,
        )
        return (await asyncio.to_thread(wait.is_given_up)).told

    def _describe_illness(self, keeper: EngineKeeper, error: Exception, told: str) -> MegappoError:
        if isinstance(error, TimeoutError):
            error = TimeoutError(
                f"no answer within {self._limits.hang_timeout_s:g} s (rollout.recovery.hang_timeout_s){told}"
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
        """Return when an engine can take part in a hand-over; restarts that were held back begin.

        Raises:
            EngineError: none ever will, or none did in the time in which all its restarts fail or one succeeds.
        """
        self.allow_starts()
        limit_s = self.longest_recovery_s
        try:
            await asyncio.wait_for(self._wait_until(self._is_settled), limit_s)
        except TimeoutError:
            raise EngineError(
                f"no rollout engine came back within {limit_s:g} s, what rollout.recovery.max_restarts="
                f"{self._limits.max_restarts} restarts may take; the last failure: {self._last_failure} (raise "
                f"rollout.start_timeout_s={self._config.rollout.start_timeout_s:g} if engines only start slowly)"
            ) from None
        if self.broken is not None:
            raise self.broken

    def _is_settled(self) -> bool:
        return self.broken is not None or any(keeper.in_service for keeper in self._keepers)

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def _backoff_s(self, restart: int) -> float:
        """Return the wait before a restart, which count from 1."""
        return min(self._limits.backoff_s * 2 ** (restart - 1), self._limits.max_backoff_s)

    @property
    def longest_start_s(self) -> float:
        """Return the time after which the process of an engine answers or has failed."""
        return self._config.cluster.start_timeout_s + self._config.rollout.start_timeout_s + _ANSWER_S

    @property
    def longest_recovery_s(self) -> float:
        """Return the time after which an engine serves or is given up."""
        restarts = range(1, self._limits.max_restarts + 1)
        return sum(self._backoff_s(restart) + self.longest_start_s for restart in restarts) + _ANSWER_S

    def allow_starts(self) -> None:
        """Let restarts begin."""
        self._may_start.set()

    async def hold_starts(self) -> None:
        """Hold restarts back while another role has the devices; returns once no engine is starting any more, at the
        latest at the deadline of a start."""
        self._may_start.clear()
        await self._wait_until(
            lambda: self.broken is not None or all(keeper.state is not EngineState.starting for keeper in self._keepers)
        )

    def _tell_waiting(self) -> None:
        self._changed.set()

    def _say(self, line: str) -> None:
        logger.warning("%s", line)
        self._note(line)
