"""The generate calls under way, over all engines: what is sent where, what comes back, and what is sent again.

One event loop calls everything here; each generate call of the pool is a `Job` with an outbox that its thread reads.
Invariant: a group of a job is settled exactly once: finished (put into the outbox), kept as begun (after a stop), or
dropped with its job. What an engine returns that does not hold the group any more is not heard.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from ray.exceptions import RayActorError, RayError, RayTaskError

from megappo.batch.refs import Ref
from megappo.cluster.engine_keeper import EngineKeeper, EngineState
from megappo.cluster.kept_tokens import KeptGroup, KeptTokens
from megappo.cluster.recovery import EngineRecovery, Spawn
from megappo.cluster.restoring import WeightRestorer
from megappo.cluster.rollout_host import GenerateCall, GroupReport
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, FinishedGroup
from megappo.errors import EngineError, MegappoError, RequestError
from megappo.rewards.types import Sample
from megappo.rollout.dispatch import Dispatcher, Work
from megappo.rollout.usage import UsageMeter

_MAX_FAILED_CALLS = 3
"""An engine that is well, but fails so many calls without one that succeeds, is restarted; a group
that so many calls in a row fail for, at engines that are well, ends its job."""
_ABORT_AGAIN_S = 0.5
"""A request that is on its way to an engine when that is told to abort is missed, and aborted the next time."""


_ANSWER_S = 30.0
"""What an answer may take over the engine's own deadline, which comes first and says more."""

Message = FinishedGroup | MegappoError | None
"""What a job's thread reads; None is the end."""


@dataclass(kw_only=True)
class Job:
    """One generate call."""

    number: int
    sampling: SamplingConfig
    seed: int
    wanted: int
    draws: dict[int, Draw]
    """By key of their work; those that are not settled."""
    outbox: SimpleQueue[Message] = field(default_factory=SimpleQueue[Message])
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    complete: int = 0
    stopping: bool = False
    news: float = field(default_factory=time.monotonic)
    """When something last came back from any engine, or became of one."""
    failures: dict[int, list["_Failure"]] = field(default_factory=dict[int, list["_Failure"]])
    """By key, those since the group last came back from an engine."""


class _Failure(NamedTuple):
    """A failed call of a group at an engine that is well."""

    engine: int
    life: int
    answered: int
    """Calls that the engine had answered by then."""


class Generation:
    """Deals the groups of all jobs over the engines that serve."""

    def __init__(
        self,
        config: RunConfig,
        keepers: Sequence[EngineKeeper],
        *,
        kept: KeptTokens,
        meter: UsageMeter,
        recovery: EngineRecovery,
        spawn: Spawn,
    ) -> None:
        self._config = config
        self._keepers = keepers
        self._kept = kept
        self._meter = meter
        self._recovery = recovery
        self._spawn = spawn
        self._dispatcher = Dispatcher(slow_factor=config.rollout.recovery.slow_factor)
        self._jobs: dict[int, Job] = {}
        self._next_job = 0
        self._next_key = 0
        self._failed_calls: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        """Calls answered, by engine."""
        self._asked: set[int] = set()
        """Engines that are being asked, after a failed call, whether they are well."""
        self.restorer = WeightRestorer(
            keepers,
            recovery=recovery,
            spawn=spawn,
            is_generating=self._is_generating,
            trainer_failed=self._trainer_failed,
        )

    def open(self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None) -> Job:
        """Begin a job. Raises EngineError when no engine is left."""
        if self._recovery.broken is not None:
            raise self._recovery.broken
        keys = range(self._next_key, self._next_key + len(draws))
        job = Job(
            number=self._next_job,
            sampling=sampling,
            seed=seed,
            wanted=len(draws) if wanted is None else wanted,
            draws=dict(zip(keys, draws)),
        )
        self._next_job, self._next_key = self._next_job + 1, keys.stop
        self._jobs[job.number] = job
        self._dispatcher.add([self._work(key, draw, job) for key, draw in job.draws.items()])
        self._close_if_settled(job)
        self.restorer.begin()
        self._pump()
        return job

    def _work(self, key: int, draw: Draw, job: Job) -> Work:
        begun = self._kept.begun(draw)
        return Work(
            key=key,
            batch=job.number,
            prompt=hash(tuple(draw.prompt.tokens)),
            num_samples=len(draw.sequence_ids),
            prompt_tokens=len(draw.prompt.tokens),
            max_new_tokens=job.sampling.max_new_tokens,
            begun_tokens=0 if begun is None else begun.begun_tokens,
            home=None if begun is None else begun.engine,
        )

    def _heard(self) -> None:
        """Note that engines are at work, or being brought back to it."""
        now = time.monotonic()
        for job in self._jobs.values():
            job.news = now

    @property
    def longest_silence_s(self) -> float:
        """Return the time in which something must come back: a call of an engine, or an engine, if all its restarts but
        the last fail."""
        return self._config.rollout.request_timeout_s + _ANSWER_S + self._recovery.longest_recovery_s

    def held_by(self, index: int) -> list[tuple[int, int, float]]:
        """Return the groups that an engine has: their id, data row, and since when; from any thread."""
        found: list[tuple[int, int, float]] = []
        for work, since in self._dispatcher.held_by(index):
            job = self._jobs.get(work.batch)
            if job is not None and (draw := job.draws.get(work.key)) is not None:
                found.append((draw.group_id, draw.prompt.row, since))
        return found

    def _is_generating(self) -> bool:
        return any(not job.stopping for job in list(self._jobs.values()))

    def _trainer_failed(self, error: MegappoError) -> None:
        for job in list(self._jobs.values()):
            self._end_job(job, error)

    async def close(self, job: Job) -> None:
        """End a job early; returns when no engine works for it any more."""
        self._stop(job)
        await job.closed.wait()

    def _pump(self) -> None:
        """Send what engines can take, and move what should go on elsewhere."""
        now = time.monotonic()
        for index, works in self._dispatcher.assign(now):
            keeper, job = self._keepers[index], self._jobs[works[0].batch]
            self._spawn(self._send(keeper, works, job=job, life=keeper.life))
        for index in self._dispatcher.behind(now):
            self._meter.count_moved(self._dispatcher.suspend(index))
            self._spawn(self._abort(self._keepers[index], None))
        serving = [keeper.index for keeper in self._keepers if keeper.state is EngineState.serving]
        busy = [index for index in serving if self._dispatcher.holds(index)]
        self._meter.observe(now, generating=bool(self._jobs), engines=serving, busy=busy)

    async def _send(self, keeper: EngineKeeper, works: list[Work], *, job: Job, life: int) -> None:
        """Make one call, and take in what comes back. `life` is that of the engine when it was dealt the groups."""
        if keeper.life != life:
            return  # they are queued again
        if job.stopping or job.closed.is_set():
            self._give_back(keeper.index, works, job)
            return
        draws = [job.draws[work.key] for work in works]
        begun = [self._kept.begun(draw) for draw in draws]
        call = GenerateCall(
            draws=draws,
            begun=[position for position, group in enumerate(begun) if group is not None],
            sampling=job.sampling,
            seed=job.seed,  # the same for all engines: who answers a prompt depends on their speed
        )
        arguments = [group.ref for group in begun if group is not None]
        refs = keeper.host.generate.options(num_returns=3 * len(works)).remote(call, *arguments)
        request_timeout_s = self._config.rollout.request_timeout_s
        try:
            reports = await asyncio.wait_for(asyncio.gather(*refs[::3]), request_timeout_s + _ANSWER_S)
        except (RayError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                error = TimeoutError(
                    f"no answer within {request_timeout_s + _ANSWER_S:g} s, and "
                    f"rollout.request_timeout_s={request_timeout_s:g} interrupts what takes longer"
                )
            if keeper.life == life:
                await self._call_failed(keeper, works, error, job=job)
            return
        self._heard()
        if keeper.life == life:
            self._failed_calls[keeper.index] = 0
            self._answered[keeper.index] = self._answered.get(keeper.index, 0) + 1
            for position, (work, report) in enumerate(zip(works, reports)):
                self._returned(keeper.index, work, report, *refs[3 * position + 1 : 3 * position + 3])
            self._pump()

    def _returned(self, index: int, work: Work, report: GroupReport, samples: Ref[list[Sample]], tokens: Any) -> None:
        """Take in one group, finished or aborted."""
        job = self._jobs.get(work.batch)
        if self._dispatcher.returned(index, work.key, report.progress, time.monotonic()) is None or job is None:
            return
        draw = job.draws[work.key]
        job.failures.pop(work.key, None)
        self._meter.keep(report.progress.new_tokens)
        begun_tokens = work.begun_tokens + report.progress.new_tokens
        group = KeptGroup(ref=tokens, engine=index, sequence_ids=draw.sequence_ids, begun_tokens=begun_tokens)
        if report.progress.finished:
            self._kept.finish(draw, group)
            job.complete += 1
            job.outbox.put(FinishedGroup(sequences=report.sequences, samples=samples))
            self._settle(job, work.key)
            if job.complete >= job.wanted:
                self._stop(job)
            return
        if begun_tokens:
            self._kept.begin(draw, group)
        if job.stopping:
            self._settle(job, work.key)
        else:  # it moves
            self._dispatcher.add([replace(work, begun_tokens=begun_tokens, home=None)])

    def _settle(self, job: Job, key: int) -> None:
        job.draws.pop(key, None)  # `end` may have dropped it
        self._close_if_settled(job)

    def _close_if_settled(self, job: Job) -> None:
        if not job.draws and not job.closed.is_set():
            del self._jobs[job.number]
            job.closed.set()
            job.outbox.put(None)

    def _stop(self, job: Job) -> None:
        """Abort what is left of a job."""
        if job.stopping or job.closed.is_set():
            return
        job.stopping = True
        self._drop_queued(job)
        for index in self._dispatcher.engines_with(job.number):
            self._spawn(self._abort(self._keepers[index], job))

    def _drop_queued(self, job: Job) -> None:
        for work in self._dispatcher.cancel(job.number):
            self._settle(job, work.key)

    def _give_back(self, index: int, works: Sequence[Work], job: Job) -> None:
        """Queue what an engine did not do, or drop it with a job that is stopping."""
        self._dispatcher.give_back(index, [work.key for work in works])
        if job.stopping or job.closed.is_set():
            self._drop_queued(job)

    async def _abort(self, keeper: EngineKeeper, job: Job | None) -> None:
        """Abort what an engine has; of a job, until it has nothing of that. Groups of other jobs go on afterwards."""
        life = keeper.life
        while keeper.life == life:
            try:
                await asyncio.wait_for(keeper.call("abort").ref, self._config.rollout.recovery.hang_timeout_s)
            except (RayError, TimeoutError) as error:
                self._recovery.fail(keeper.index, keeper.failure(error, "abort"), life=life)
                return
            await asyncio.sleep(_ABORT_AGAIN_S)
            if job is None:
                self._dispatcher.resume(keeper.index)
                self._pump()
                return
            if keeper.index not in self._dispatcher.engines_with(job.number):
                return

    async def _call_failed(self, keeper: EngineKeeper, works: Sequence[Work], error: Exception, *, job: Job) -> None:
        """Find out who is at fault: the request (the job ends), the engine (it is restarted), or nobody for sure (the
        groups are sent again)."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        failure = keeper.failure(error, "generate")
        life = keeper.life
        if isinstance(error, RayActorError | TimeoutError):
            self._recovery.fail(keeper.index, failure, life=life)
            return
        self._give_back(keeper.index, works, job)
        if isinstance(cause, RequestError) or not isinstance(cause, EngineError):
            self._end_job(job, failure)
            self._pump()
            return
        self._meter.count_retries(len(works))
        if keeper.index in self._asked:
            return
        self._asked.add(keeper.index)
        self._dispatcher.suspend(keeper.index)
        self._pump()  # others may do it meanwhile
        self._failed_calls[keeper.index] = self._failed_calls.get(keeper.index, 0) + 1
        well = await self._recovery.is_well(keeper.index)
        if keeper.life != life:
            return
        self._asked.discard(keeper.index)
        if well and self._blame_groups(job, works, engine=keeper.index, life=life):
            self._end_job(job, self._describe_groups(job, works, failure))
        elif not well or self._failed_calls[keeper.index] >= _MAX_FAILED_CALLS:
            self._recovery.fail(keeper.index, failure, life=life)
            return
        self._dispatcher.resume(keeper.index)
        self._pump()

    def _blame_groups(self, job: Job, works: Sequence[Work], *, engine: int, life: int) -> bool:
        """Note a failed call of groups at an engine that is well. Returns whether they are at fault, not the engines:
        after so many failures in a row, at different processes or with answers to other groups in between."""
        failure = _Failure(engine=engine, life=life, answered=self._answered.get(engine, 0))
        for work in works:
            if work.key not in job.draws:
                continue
            seen = job.failures.setdefault(work.key, [])
            seen.append(failure)
            processes = {(one.engine, one.life) for one in seen}
            if len(seen) >= _MAX_FAILED_CALLS and (len(processes) > 1 or len(set(seen)) >= _MAX_FAILED_CALLS):
                return True
        return False

    def _describe_groups(self, job: Job, works: Sequence[Work], failure: MegappoError) -> EngineError:
        rows = sorted({job.draws[work.key].prompt.row for work in works if work.key in job.draws})
        named = f"data row {rows[0]}" if len(rows) == 1 else f"one of the data rows {', '.join(map(str, rows))}"
        return EngineError(
            f"{named} cannot be answered: {_MAX_FAILED_CALLS} calls in a row failed at engines that are well; the "
            f"last: {failure}"
        )

    def _end_job(self, job: Job, error: MegappoError) -> None:
        """End a job with an error, unless it has what was wanted of it already."""
        if not job.stopping:
            job.outbox.put(error)
            self._stop(job)

    def engine_left(self, index: int) -> int:
        """Queue what an engine had."""
        self._heard()
        lost = self._dispatcher.remove_engine(index)
        self._meter.count_retries(len(lost))
        self._failed_calls.pop(index, None)
        self._asked.discard(index)
        for job in [job for job in self._jobs.values() if job.stopping]:
            self._drop_queued(job)
        self._pump()
        return len(lost)

    def engine_is_fresh(self, index: int) -> None:
        """Give an engine its weights; where nothing is generated it waits for the next job, or the next hand-over."""
        self._heard()
        self.restorer.begin()

    def engine_serves(self, index: int) -> None:
        """Let an engine take groups."""
        self._heard()
        self._dispatcher.add_engine(index, at_once=self._keepers[index].at_once)
        self._pump()

    def has_groups(self, index: int) -> bool:
        """Whether an engine has prompts."""
        return self._dispatcher.holds(index)

    def time_passed(self) -> None:
        """Move what should go on elsewhere, also while nothing comes back."""
        self._pump()

    def end(self, error: MegappoError) -> None:
        """End all jobs with an error."""
        for job in list(self._jobs.values()):
            job.outbox.put(error)
            self._dispatcher.cancel(job.number)
            job.draws.clear()
            self._close_if_settled(job)
