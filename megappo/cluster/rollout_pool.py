"""All rollout engines as one client: prompts are dealt over them, groups come back as they finish, and engines that
fail are replaced (`cluster.recovery`) while their prompts go on (`cluster.generation`)."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import ray

from megappo.batch.fields import concat, empty, select
from megappo.batch.refs import Ref
from megappo.batch.stages import RolloutBatch
from megappo.cluster.begun_answers import open_begun, pack_begun
from megappo.cluster.engine_keeper import EngineKeeper, EngineState
from megappo.cluster.generation import Generation, Job, Message
from megappo.cluster.kept_tokens import KeptGroup, KeptTokens
from megappo.cluster.loop_thread import BUSY_S, LoopThread, give_up
from megappo.cluster.observed import Ask
from megappo.cluster.placement import Slot
from megappo.cluster.recovery import EngineRecovery
from megappo.cluster.restoring import Restore
from megappo.cluster.runtime import Call, gather
from megappo.cluster.watchdog_parts import busy_engines, describe_engines
from megappo.config.cluster import DeviceKind
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, FinishedGroup, HeldRollouts, Shard
from megappo.errors import EngineError, MegappoError, WorkerError
from megappo.observability.logging import get_logger
from megappo.observability.metrics import Metrics
from megappo.observability.waiting import Wait
from megappo.rollout.engine import SampledResponse
from megappo.rollout.usage import UsageMeter

logger = get_logger(__name__)

_STOP_S = 5.0
"""Longest wait for engines to end by themselves."""


class _DeviceHolder:
    """Keeps a device of a multi-device engine reserved and tells its id."""

    def device_ids(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids().get("GPU", [])


class RolloutPool:
    """The engines of a run (port: RolloutClient).

    What concerns engines and their prompts happens on one event loop in a thread of its own, so that several threads
    may generate at once and engines are watched and restarted meanwhile.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        slots: Sequence[Slot],
        device: DeviceKind,
        log_dir: Path,
        note: Callable[[str], None] = logger.info,
        restarts_wait: bool | None = None,
    ) -> None:
        """Begin to start the engines. `note` is told, from any thread, of engines that fail and come back.
        `restarts_wait`: whether no engine may be started while the pool sleeps, since its devices are in use; None: on
        CUDA."""
        self._config = config
        self._restarts_wait = device is DeviceKind.cuda if restarts_wait is None else restarts_wait
        self._asleep: dict[int, int] = {}
        """Engines that sleep, and the number of the process that does."""
        self._holders: list[Any] = []
        width = config.rollout.tensor
        self._keepers: list[EngineKeeper] = []
        shares = [slots[index * width : (index + 1) * width] for index in range(config.rollout.num_engines)]
        devices = [self._reserve(mine) if device is DeviceKind.cuda else [] for mine in shares]
        for index, (mine, own) in enumerate(zip(shares, devices)):
            # An engine uses the first ones; memory that the trainer shares may be on any of them.
            others = [other for share in devices for other in share if config.weight_sync.transport == "ipc"]
            visible = list(dict.fromkeys([*own, *others]))
            self._keepers.append(
                EngineKeeper(config, index=index, slot=mine[0], visible_devices=visible, device=device, log_dir=log_dir)
            )
        self._kept = KeptTokens()
        self._meter = UsageMeter()
        self._loop = LoopThread("rollout-pool", failed=self._loop_failed, outstanding=self.describe)
        self._recovery = EngineRecovery(config, self._keepers, meter=self._meter, note=note, spawn=self._loop.spawn)
        self._generation = Generation(
            config, self._keepers, kept=self._kept, meter=self._meter, recovery=self._recovery, spawn=self._loop.spawn
        )
        self._recovery.user = self._generation
        self._loop.start()

    def _reserve(self, slots: Sequence[Slot]) -> list[str]:
        """Hold all devices of one engine; returns their ids."""
        holders: list[Any] = [ray.remote(_DeviceHolder).options(**slot.options()).remote() for slot in slots[1:]]
        probe: Any = ray.remote(_DeviceHolder).options(**slots[0].options()).remote()
        ids = [
            ids[0]
            for ids in ray.get(
                [holder.device_ids.remote() for holder in (probe, *holders)],
                timeout=self._config.cluster.start_timeout_s,
            )
        ]
        ray.kill(probe)
        self._holders += holders
        return ids

    def _loop_failed(self, error: BaseException) -> None:
        logger.error("the rollout pool failed", exc_info=error)
        self._generation.end(EngineError(f"the rollout pool failed: {type(error).__name__}: {error}"))

    def describe(self) -> list[str]:
        """Say how every engine is and what it has to do; from any thread."""
        return describe_engines(self._keepers, self._generation.held_by)

    # Start, and what a hand-over needs

    def start(self) -> list[Call]:
        """Start all engines; returns the calls to pass to `finish_start`."""
        calls = [keeper.call("identity") for keeper in self._keepers]
        places = gather(
            calls, phase="start", timeout_s=self._config.cluster.start_timeout_s, key="cluster.start_timeout_s"
        )
        for keeper, place in zip(self._keepers, places):
            keeper.place = place
        return [keeper.call("start") for keeper in self._keepers]

    def finish_start(self, calls: Sequence[Call], *, timeout_s: float) -> None:
        """Wait for the engines to answer; they take prompts once they have weights. Raises what `gather` raises."""
        at_once = gather(calls, phase="start", timeout_s=timeout_s, key="rollout.start_timeout_s")
        for keeper, sequences in zip(self._keepers, at_once):
            self._loop.call(lambda index=keeper.index, sequences=sequences: self._recovery.started(index, sequences))

    def restore_with(self, restore: Restore) -> None:
        """Name the function that brings one engine to the weights of the last hand-over; it is called in a thread."""
        self._generation.restorer.restore = restore

    def in_service(self) -> list[int]:
        """Return the engines that take part in a hand-over."""
        return [keeper.index for keeper in self._keepers if keeper.in_service]

    def life(self, engine: int) -> int:
        """Return the number of an engine's process: another one knows nothing of groups joined before."""
        return self._keepers[engine].life

    def lives(self) -> dict[int, int]:
        """Return the same of all engines in service."""
        return {keeper.index: keeper.life for keeper in self._keepers if keeper.in_service}

    def admit(self, lives: Mapping[int, int]) -> None:
        """Let engines take prompts, since these processes of them have the weights of the last hand-over."""
        self._loop.call(lambda: self._recovery.admit(lives))

    def quarantine(self, engine: int, reason: str, *, life: int) -> None:
        """Take an engine out of service, if that process of it still is; it is started anew as `rollout.recovery`
        says."""
        keeper = self._keepers[engine]
        named = reason if reason.startswith(f"rollout engine {engine} ") else f"{keeper.name}: {reason}"
        self._fail(keeper, life, EngineError(named))

    def _fail(self, keeper: EngineKeeper, life: int, error: MegappoError) -> None:
        self._loop.call(lambda: self._recovery.fail(keeper.index, error, life=life))

    def revive(self) -> None:
        """Wait until an engine is in service. Raises EngineError if none will be."""
        self._loop.wait(
            self._recovery.wait_in_service(),
            phase="restart of an engine",
            limit_s=self._recovery.longest_recovery_s + BUSY_S,
        )

    def observed(self) -> dict[str, Ask]:
        """Return how to ask the host of each engine in service what it does, by name."""
        return {f"engine_{index}": self._keepers[index].call for index in self.in_service()}

    def calls(self, method: str, *args: Any) -> list[Call]:
        """Start one method on the host of every engine in service."""
        return [self.call(index, method, *args) for index in self.in_service()]

    def call(self, index: int, method: str, *args: Any) -> Call:
        """Start one method on one engine host."""
        return self._keepers[index].call(method, *args)

    # The client

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        """Deal the draws over the engines and yield groups as they finish; see the port. Several threads may do so.

        Raises:
            EngineError: no engine is left, or `rollout.recovery.max_restarts` is 0 and one failed.
            RequestError: no engine can answer one of the prompts.
            WorkerError: the trainer failed while it gave a restarted engine its weights; that engine waits for others.
        """
        job = self._loop.call(lambda: self._generation.open(draws, sampling, seed=seed, wanted=wanted))
        try:
            yield from self._read(job)
        except GeneratorExit:
            self._loop.wait(self._generation.close(job), phase="abort", limit_s=self._generation.longest_silence_s)
            raise

    def _read(self, job: Job) -> Iterator[FinishedGroup]:
        while (message := self._next(job)) is not None:
            if isinstance(message, MegappoError):
                raise message
            yield message

    def _next(self, job: Job) -> Message:
        """Wait for what comes of a job. Raises EngineError when for long nothing comes back from any engine."""
        limit_s = self._generation.longest_silence_s
        busy = partial(busy_engines, self._keepers, self._generation.held_by)
        with Wait(phase="generate", outstanding=busy, limit_s=limit_s, news=lambda: job.news) as wait:
            while True:
                try:
                    return job.outbox.get(timeout=wait.left_s)
                except Empty:
                    if any(keeper.state is EngineState.fetching for keeper in self._keepers):
                        # It is given its weights, and may have to wait for the trainer: both have limits of their own.
                        job.news = time.monotonic()
                    if not wait.left_s:
                        give_up(wait)

    def pack(self, shards: Sequence[Sequence[int]], *, forget: Sequence[int] = ()) -> list[Shard]:
        """Cut sampled sequences into shards; the engines forget them, and those to `forget`."""
        packed = [Shard(sequence_ids=list(sequence_ids), pieces=[]) for sequence_ids in shards]
        if any(packed_shard.sequence_ids for packed_shard in packed):
            while (pieces := self._cut(shards)) is None:
                self.revive()
            for number, ref in pieces:
                packed[number].pieces.append(ref)
        self._kept.forget(forget)
        for sequence_ids in shards:
            self._kept.forget(sequence_ids)
        return packed

    def read(self, sequence_ids: Sequence[int]) -> HeldRollouts:
        """Bring here what is held of some sequences; see the port."""
        finished, begun = self._kept.of(sequence_ids)
        batches: list[RolloutBatch] = self._fetch(finished)
        answers: list[list[SampledResponse]] = self._fetch(list(begun.values()))
        whole = concat(batches or [empty(RolloutBatch)])
        by_id = np.argsort(whole.sequence_ids)  # engines finish in any order
        return HeldRollouts(
            complete=select(whole, by_id[np.isin(whole.sequence_ids[by_id], list(sequence_ids))]),
            begun=pack_begun({key: (begun[key].sequence_ids, found) for key, found in zip(begun, answers)}),
        )

    def _fetch(self, groups: Sequence[KeptGroup]) -> list[Any]:
        calls = [
            Call(ref=group.ref, worker=(keeper := self._keepers[group.engine]).name, log_paths=keeper.log_paths)
            for group in groups
        ]
        return gather(
            calls, phase="read", timeout_s=self._config.rollout.request_timeout_s, key="rollout.request_timeout_s"
        )

    def adopt(self, held: HeldRollouts) -> None:
        """Hold what an earlier run has read; see the port."""
        engines = itertools.cycle(range(len(self._keepers)))
        whole, finished = held.complete, list[KeptGroup]()
        for group_id in np.unique(whole.group_ids):
            group = select(whole, np.flatnonzero(whole.group_ids == group_id))
            ids: list[int] = group.sequence_ids.tolist()
            finished.append(KeptGroup(ref=ray.put(group), engine=next(engines), sequence_ids=ids))
        begun = {
            group_id: KeptGroup(
                ref=ray.put(answers),
                engine=next(engines),
                sequence_ids=ids,
                begun_tokens=sum(len(answer.tokens) for answer in answers),
            )
            for group_id, (ids, answers) in open_begun(held.begun).items()
        }
        self._kept.adopt(finished, begun)

    def _cut(self, shards: Sequence[Sequence[int]]) -> list[tuple[int, Ref[Any]]] | None:
        """Have each engine cut the groups near it into shards. Returns (number of the shard, piece); None after a
        failure, which took the engine out of service."""
        engines = self.in_service()
        if not engines:
            return None
        pieces: list[tuple[int, Ref[Any]]] = []
        done: list[tuple[EngineKeeper, int, Call]] = []
        for engine, (parts, groups) in self._kept.by_engine(shards, engines).items():
            keeper = self._keepers[engine]
            life = keeper.life
            first, *refs = keeper.host.pack.options(num_returns=1 + len(parts)).remote(list(parts.values()), *groups)
            done.append((keeper, life, Call(ref=first, worker=keeper.name, log_paths=keeper.log_paths)))
            pieces += zip(parts, refs)
        return pieces if self._gather_each(done, "pack", self._config.rollout.request_timeout_s) else None

    def _gather_each(self, calls: Sequence[tuple[EngineKeeper, int, Call]], phase: str, timeout_s: float) -> bool:
        """Wait for calls to processes of engines, given with their numbers; an engine that fails is taken out of
        service. Returns whether all were answered."""
        well = True
        for keeper, life, call in calls:
            try:
                gather([call], phase=phase, timeout_s=timeout_s, recovers=True)
            except (EngineError, WorkerError) as error:
                self._fail(keeper, life, error)
                well = False
        if self._recovery.broken is not None:
            raise self._recovery.broken
        return well

    def sleep(self) -> None:
        """Release engine memory for training. Where devices are shared, an engine that is starting is waited for and
        sleeps, too, and others are started only when the weights come back."""
        if self._restarts_wait:
            limit_s = self._recovery.longest_start_s + BUSY_S
            self._loop.wait(self._recovery.hold_starts(), phase="start of an engine", limit_s=limit_s)
        self._asleep = {keeper.index: keeper.life for keeper in self._keepers if keeper.in_service}
        self._change_memory("sleep")

    def wake_weights(self) -> None:
        """Take back the memory of the weights; from now on engines may be started again, since the hand-over waits for
        one where none is left."""
        self._loop.call(self._recovery.allow_starts)
        self._change_memory("wake_weights")

    def wake_cache(self) -> None:
        """Take back the rest."""
        self._change_memory("wake_cache")
        self._asleep = {}

    def _change_memory(self, method: str) -> None:
        """Call a method of the engines that sleep: a process that was started since then knows nothing of it."""
        start = time.perf_counter()
        calls = [
            (keeper, life, keeper.call(method))
            for keeper in self._keepers
            if keeper.in_service and self._asleep.get(keeper.index) == (life := keeper.life)
        ]
        self._gather_each(calls, method, self._config.weight_sync.timeout_s)
        logger.info("%s: %d engines, %.3f s", method, len(calls), time.perf_counter() - start)

    def take_metrics(self) -> Metrics:
        """Return how the engines were used since the last call: `perf/goodput_tokens_per_s`, idle shares, retries,
        restarts."""
        return self._loop.call(lambda: self._meter.take(time.monotonic()))

    def stop(self) -> None:
        """End all engines; a host that does not answer is killed with its engine."""
        self._loop.stop()
        # A host that has not answered yet is still importing and would not hear us; it has started nothing either.
        stops = [
            keeper.host.stop.remote()
            for keeper in self._keepers
            if keeper.place and keeper.state not in (EngineState.down, EngineState.lost)
        ]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_S)
        for keeper in self._keepers:
            ray.kill(keeper.host)
        for holder in self._holders:
            ray.kill(holder)
