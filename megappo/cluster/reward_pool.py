"""Scoring processes: finished groups are scored beside generation.

The pool's thread gives a group to the process with the fewest, a few at a time, so that none waits behind a slow one
while another process is idle. What a reward does to its process is the business of `megappo.rewards.scorer`, inside the
Ray actor: for every sample there is a reward or a failure.
"""

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megappo.cluster.observed import Ask, ObservedProcess
from megappo.cluster.placement import Slot
from megappo.cluster.reward_desk import DeskClient
from megappo.cluster.runtime import Call, begin_worker, describe_failure, describe_process, gather
from megappo.cluster.watchdog_parts import shown
from megappo.config.reward import FailedReward, terms_of
from megappo.config.reward_rules import reward_sections
from megappo.config.run import RunConfig
from megappo.controller.ports import FinishedGroup, ScoredGroups
from megappo.errors import MegappoError, WorkerError
from megappo.observability.logging import get_logger
from megappo.observability.metrics import total
from megappo.observability.phases import phase
from megappo.observability.waiting import Wait
from megappo.rewards import Failure, Reward, Sample, error_of
from megappo.rewards.scorer import ScoredSamples, Scorer, ScorerSettings

logger = get_logger(__name__)

_STOP_S = 3.0
"""Time for the scoring processes to be ended in order."""
_RESTART_S = 60.0
"""What a new scoring process takes at most, as far as a last time limit is concerned."""


class RewardWorker(ObservedProcess):
    """Ray actor body: asks one scoring process. Its calls run in one event loop, so several may wait at a time."""

    def __init__(self, config: RunConfig, index: int, log_path: Path, desk: DeskClient | None = None) -> None:
        begin_worker(log_path, role="reward", rank=index, name=f"reward worker {index}")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._desk = desk
        reward = config.reward
        self._scorer = Scorer(
            ScorerSettings(
                sections=reward_sections(config),
                concurrency=reward.concurrency,
                timeout_s=reward.timeout_s,
                retries=reward.retries,
                start_timeout_s=config.cluster.start_timeout_s,
            )
        )

    async def ready(self) -> str:
        """Load the rewards; returns where this process runs."""
        await self._scorer.start()
        return describe_process()

    async def score(self, samples: list[Sample]) -> ScoredSamples:
        """Score one group, in order."""
        with phase("rewards", samples=len(samples)):
            if self._desk is None:
                return await self._scorer.score(samples)
            start = time.monotonic()
            scored = await self._desk.add_scores(samples)
            model_s = time.monotonic() - start
            found = await self._scorer.score(scored)
            return replace(found, busy_s=found.busy_s + model_s)

    async def close(self) -> None:
        """End the scoring process."""
        await self._scorer.close()


@dataclass(slots=True, eq=False)
class _Group:
    """A group on its way."""

    scoring: "PoolScoring"
    group: FinishedGroup
    worker: int = -1
    since: float = 0.0
    """When, by `time.monotonic`, the worker got it."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A scoring process."""

    # Any: a Ray actor handle has no type of its own.
    handle: Any
    name: str
    log_path: Path
    under_way: set[_Group] = field(default_factory=set[_Group])


class RewardPool:
    """The scoring processes of a run (port: RewardClient)."""

    def __init__(
        self,
        config: RunConfig,
        *,
        slots: Sequence[Slot],
        log_dir: Path,
        note: Callable[[str], None] | None = None,
        desk: DeskClient | None = None,
    ) -> None:
        """Start one process per slot, or `reward.workers` processes without a device when there are no slots.

        Args:
            note: is told, from any thread, of the first failure of each kind.
            desk: of the run's reward model; None: no reward asks one.
        """
        self.config = config.reward
        self.desk = desk
        self._call_timeout_s = config.cluster.call_timeout_s
        self._note = note or logger.warning
        self.most_terms = max(len(terms_of(section)) for section in reward_sections(config).values())
        """Reward functions that score one sample, at most."""
        # Enough groups for the rollout log, and for the answers shown before and after.
        self._shown_groups = max(8, -(-config.trainer.num_rollout_samples // config.batching.samples_per_prompt))
        options = [slot.options() for slot in slots] or [{"num_cpus": 0}] * config.reward.workers
        self._workers: list[_Worker] = []
        for index, option in enumerate(options):
            path = log_dir / f"reward-{index}.log"
            handle = ray.remote(RewardWorker).options(**option).remote(config, index, path, desk)
            self._workers.append(_Worker(handle, f"reward worker {index}", path))
        # One more than it scores at a time: the next is there when one is done.
        self._most_under_way = config.reward.concurrency + 1
        self._waiting: deque[_Group] = deque()
        # None ends the thread; a group without an answer is new.
        self._events: queue.SimpleQueue[tuple[_Group, Call | None] | None] = queue.SimpleQueue()
        self._told: set[str] = set()
        threading.Thread(target=self._dispatch, daemon=True, name="rewards").start()

    def start(self) -> list[Call]:
        """Load the rewards; returns the calls to wait for."""
        return [self._call(worker, worker.handle.ready.remote()) for worker in self._workers]

    def begin(self, *, all_texts: bool = False) -> "PoolScoring":
        """Return a handle for the groups of one generation; see the port."""
        return PoolScoring(self, shown_groups=None if all_texts else self._shown_groups)

    def submit(self, group: _Group) -> None:
        """Start scoring a group."""
        self._events.put((group, None))

    def stop(self) -> None:
        """End the workers, with the processes that they started."""
        self._events.put(None)
        ending = [worker.handle.close.remote() for worker in self._workers]
        ray.wait(ending, num_returns=len(ending), timeout=_STOP_S)
        for worker in self._workers:
            ray.kill(worker.handle)

    def describe(self) -> list[str]:
        """Say what every worker scores; from any thread. (Which sample, with its reward, is on the worker's board.)"""
        idle = [worker.name for worker in self._workers if not worker.under_way]
        return [*self.busy(), *([f"idle: {shown(idle)}"] if idle else [])]

    def busy(self) -> list[str]:
        """Say the same of those that have something to score."""
        lines: list[str] = []
        for worker in self._workers:
            if groups := sorted(worker.under_way.copy(), key=lambda group: group.since):
                named = shown([str(group.group.sequences[0].group_id) for group in groups])
                oldest_s = time.monotonic() - groups[0].since
                lines.append(f"{worker.name} (has groups {named} for up to {oldest_s:.1f} s)")
        return lines

    def texts_of(self, groups: Sequence[FinishedGroup]) -> list[list[Sample]]:
        """Return the texts of groups, which the engines' machines hold."""
        calls = [
            Call(ref=group.samples, worker=f"texts of group {group.sequences[0].group_id}", log_paths=())
            for group in groups
        ]
        return gather(calls, phase="read texts", timeout_s=self._call_timeout_s, key="cluster.call_timeout_s")

    def observed(self) -> dict[str, Ask]:
        """Return how to ask each process what it does, by name."""
        return {f"reward_{index}": partial(self._ask, worker) for index, worker in enumerate(self._workers)}

    def _ask(self, worker: _Worker, method: str, *args: Any, **kwargs: Any) -> Call:
        return self._call(worker, getattr(worker.handle, method).remote(*args, **kwargs))

    def tell_once(self, failure: Failure, worker: _Worker) -> None:
        """Log the first failure of its kind in full."""
        if failure.key in self._told:
            return
        self._told.add(failure.key)
        logger.error("%s: first failure of the kind %s\n%s", worker.name, failure.key, failure.details)
        handled = f"reward.on_failure={self.config.on_failure.name}"
        self._note(f"a reward failed ({failure.kind}, {handled}): {failure.message} (in full in {worker.log_path})")

    def _call(self, worker: _Worker, ref: Any) -> Call:  # Any: an object reference
        return Call(ref=ref, worker=worker.name, log_paths=(worker.log_path,))

    def _dispatch(self) -> None:
        """Body of the thread: it alone gives out groups and takes in answers."""
        while (event := self._events.get()) is not None:
            group, call = event
            if call is None:
                self._waiting.append(group)
            else:
                worker = self._workers[group.worker]
                worker.under_way.discard(group)
                self._take(group, worker, call)
            self._give_out()

    def _give_out(self) -> None:
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.under_way))
            if len(worker.under_way) >= self._most_under_way:
                return
            group = self._waiting.popleft()
            if group.scoring.error is not None:
                continue
            group.worker = self._workers.index(worker)
            worker.under_way.add(group)
            group.since = time.monotonic()
            call = self._call(worker, worker.handle.score.remote(group.group.samples))
            call.ref.future().add_done_callback(_Done(self._events, group, call))

    def _take(self, group: _Group, worker: _Worker, call: Call) -> None:
        try:
            group.scoring.take(group.group, ray.get(call.ref), worker)
        except Exception as error:  # a process boundary: what Ray raises for a call or its arguments
            group.scoring.fail(describe_failure(error, call=call, phase="score"))


@dataclass(slots=True, frozen=True)
class _Done:
    """Called by a thread of Ray's, which must not wait."""

    events: "queue.SimpleQueue[tuple[_Group, Call | None] | None]"
    group: _Group
    call: Call

    def __call__(self, _: Future[Any]) -> None:
        self.events.put((self.group, self.call))


class PoolScoring:
    """The groups of one generation (port: Scoring). The pool's thread calls `take` and `fail`."""

    def __init__(self, pool: RewardPool, *, shown_groups: int | None) -> None:
        """`shown_groups`: how many groups come back with their texts; None: all."""
        self._pool = pool
        self._shown_groups = shown_groups
        self._groups: list[FinishedGroup] = []
        self._rewards: dict[int, Reward] = {}
        self._changed = threading.Condition()
        self._news = time.monotonic()
        """When the last group came back."""
        self._done = 0
        self._busy_s: dict[str, float] = {}
        self._retries, self._restarts = 0, 0
        self.error: MegappoError | None = None
        """Why the rest is not scored any more."""

    @property
    def scored_ids(self) -> list[int]:
        """Sequences scored so far."""
        with self._changed:
            return list(self._rewards)

    def submit(self, group: FinishedGroup) -> None:
        """Start scoring a group; see the port."""
        if self.error is not None:
            raise self.error
        self._groups.append(group)
        self._pool.submit(_Group(self, group))

    def collect(self) -> ScoredGroups:
        """Wait for all submitted groups; see the port."""
        self._wait()
        if self.error is not None:
            raise self.error
        if self._pool.desk is not None:
            self._pool.desk.rest()
        shown = sorted(self._groups, key=lambda group: group.sequences[0].sequence_id)[: self._shown_groups]
        samples: dict[int, Sample] = {}
        for group, texts in zip(shown, self._pool.texts_of(shown)):
            samples.update({info.sequence_id: text for info, text in zip(group.sequences, texts)})
        return ScoredGroups(
            rewards=self._rewards,
            samples=samples,
            busy_s=max(self._busy_s.values(), default=0.0),
            metrics={"perf/reward_retries": total(self._retries), "perf/reward_restarts": total(self._restarts)},
        )

    def _wait(self) -> None:
        """Wait for the groups. The scoring processes keep the limits of samples; the one here is for a worker that does
        not answer though its process lives: more than it takes when every call hangs."""
        config = self._pool.config
        largest = max((len(group.sequences) for group in self._groups), default=0)
        calls = (largest * (config.retries + 1) + 1) * (config.concurrency + 1) * self._pool.most_terms
        limit_s = calls * (config.timeout_s + _RESTART_S)
        if self._pool.desk is not None:
            limit_s += self._pool.desk.timeout_s
        with Wait(phase="score", outstanding=self._pool.busy, limit_s=limit_s, news=lambda: self._news) as wait:
            while not self._wait_for_news(wait.left_s):
                if (verdict := wait.is_given_up()).goes_on:
                    continue
                self.fail(WorkerError(f"no reward worker has scored a group in {limit_s:.0f} s{verdict.told}"))

    def _wait_for_news(self, limit_s: float) -> bool:
        """Wait until everything is scored, or the scoring failed, as long as groups come back. Returns False when none
        has for so long."""
        with self._changed:
            while self._done < len(self._groups) and self.error is None:
                done = self._done
                if not self._changed.wait(limit_s) and done == self._done:
                    return False
        return True

    def take(self, group: FinishedGroup, found: ScoredSamples, worker: _Worker) -> None:
        """Take in the answer for one group."""
        config = self._pool.config
        rewards: dict[int, Reward] = {}
        error: MegappoError | None = None
        for info, outcome in zip(group.sequences, found.outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._pool.tell_once(outcome, worker)
                if config.on_failure is FailedReward.stop and error is None:
                    error = _fatal(outcome, worker)
                score = config.failed_score if config.on_failure is FailedReward.score else math.nan
                outcome = Reward(score=score, failure=str(outcome.kind))
            rewards[info.sequence_id] = outcome
        with self._changed:
            self._rewards |= rewards
            self._busy_s[worker.name] = self._busy_s.get(worker.name, 0.0) + found.busy_s
            self._retries += found.retries
            self._restarts += found.restarts
            self._done += 1
            self._news = time.monotonic()
            self.error = self.error or error
            self._changed.notify_all()

    def fail(self, error: MegappoError) -> None:
        """End the scoring: a worker cannot go on."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


def _fatal(failure: Failure, worker: _Worker) -> MegappoError:
    error = error_of(failure)
    return type(error)(
        f"{worker.name}, score: {failure.message} (in full in {worker.log_path}; with reward.on_failure=drop or score "
        "the run goes on without it)"
    )
