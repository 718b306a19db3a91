"""Drives engines through their port, with the dispatcher of a run and without its processes."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.generation.timeline import GroupSpan
from benchmarks.generation.workload import Generation
from megappo.config.cluster import DeviceKind
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.rollout import ENGINES
from megappo.rollout.dispatch import Dispatcher, Progress, Work
from megappo.rollout.engine import EngineSpec, GenerateRequest, RolloutEngine

_PROBE_GROUP = 1 << 40
"""Group ids of probes start here."""
_PROBES_IDLE = 5
_PROBE_EVERY_S = 0.25


@dataclass(kw_only=True, slots=True)
class Observed:
    """What one generation took."""

    spans: list[GroupSpan] = field(default_factory=list[GroupSpan])
    first_token_s: list[float] = field(default_factory=list[float])
    """Of probes beside the load: a new prompt of one token's response, from the call to its answer."""


class EngineFleet:
    """The engines of one setting. Use as an async context manager; leaving ends them."""

    def __init__(self, config: RunConfig, device: DeviceKind, log_dir: Path) -> None:
        self._config = config
        rollout = config.rollout
        self._engines: list[RolloutEngine] = []
        for index in range(rollout.num_engines):
            settings = rollout
            if device is DeviceKind.cuda and rollout.engine == "sglang":
                # One process sees all devices here; in a run each engine's host sees its own.
                extra = {"base-gpu-id": str(index * rollout.tensor)} | rollout.sglang.extra_args
                settings = replace(rollout, sglang=replace(rollout.sglang, extra_args=extra))
            spec = EngineSpec(
                config=settings,
                model=config.model,
                device=device,
                index=index,
                seed=config.seed,
                log_path=log_dir / f"{rollout.engine}-{index}.log",
                weight_timeout_s=config.weight_sync.timeout_s,
            )
            self._engines.append(ENGINES.get(rollout.engine)(spec))

    async def __aenter__(self) -> "EngineFleet":
        try:
            await asyncio.gather(*(engine.start() for engine in self._engines))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for engine in self._engines:
            await engine.stop()

    def slots(self, sequences: int) -> int:
        """Return how many of so many sequences the engines can run at the same time."""
        at_once = [engine.at_once for engine in self._engines]
        return sequences if None in at_once else min(sequences, sum(count or 0 for count in at_once))

    async def first_token_idle_s(self, work: Generation) -> list[float]:
        """Return the times to the first token of some probes while nothing else runs; the first of each engine, which
        warms it up, is left out."""
        for number in range(len(self._engines)):
            await probe(self._engines, work, number)
        return [await probe(self._engines, work, number) for number in range(_PROBES_IDLE)]

    async def run(self, work: Generation, *, seed: int) -> Observed:
        """Sample everything; returns when the last group is done."""
        return await _Run(self._engines, work, self._config, seed).run()


async def probe(engines: Sequence[RolloutEngine], work: Generation, number: int) -> float:
    """Ask an engine for one token after a prompt that it has not seen; returns the seconds until it is there."""
    prompt = list(work.probes[number % len(work.probes)])
    request = GenerateRequest(group_id=_PROBE_GROUP + number, prompt_tokens=prompt, num_samples=1)
    start = time.perf_counter()
    async for _ in engines[number % len(engines)].generate([request], SamplingConfig(max_new_tokens=1), seed=number):
        pass
    return time.perf_counter() - start


class _Run:
    """One generation over all engines."""

    def __init__(self, engines: Sequence[RolloutEngine], work: Generation, config: RunConfig, seed: int) -> None:
        self._engines, self._work, self._seed = engines, work, seed
        self._observed, self._over = Observed(), asyncio.Event()
        self._dispatcher = Dispatcher(slow_factor=config.rollout.recovery.slow_factor)
        for index, engine in enumerate(engines):
            self._dispatcher.add_engine(index, at_once=engine.at_once)
        self._dispatcher.add([self._as_work(request) for request in work.requests.values()])

    def _as_work(self, request: GenerateRequest) -> Work:
        batch = self._work.batch[request.group_id]
        return Work(
            key=request.group_id,
            batch=batch,
            prompt=request.group_id,
            num_samples=request.num_samples,
            prompt_tokens=len(request.prompt_tokens),
            max_new_tokens=self._work.samplings[batch].max_new_tokens,
        )

    async def run(self) -> Observed:
        """Deal out groups until all are done, with probes beside them."""
        calls: set[asyncio.Task[None]] = set()
        probing = asyncio.create_task(self._probe_beside())
        try:
            while len(self._observed.spans) < len(self._work.requests):
                for index, groups in self._dispatcher.assign(time.perf_counter()):
                    calls.add(asyncio.create_task(self._generate(index, groups)))
                done, calls = await asyncio.wait({*calls, probing}, return_when=asyncio.FIRST_COMPLETED)
                calls.discard(probing)
                for task in done:
                    task.result()
            self._over.set()
            await probing
        finally:
            for task in (probing, *calls):
                task.cancel()
            await asyncio.gather(probing, *calls, return_exceptions=True)
        return self._observed

    async def _generate(self, index: int, groups: Sequence[Work]) -> None:
        """Sample the groups of one call."""
        requests = [self._work.requests[group.key] for group in groups]
        sampling = self._work.samplings[groups[0].batch]
        start = time.perf_counter()
        async for output in self._engines[index].generate(requests, sampling, seed=self._seed):
            now, lengths = time.perf_counter(), [len(response.tokens) for response in output.responses]
            self._observed.spans.append(GroupSpan(start_s=start, end_s=now, response_tokens=lengths))
            progress = Progress(new_tokens=sum(lengths), longest_new=max(lengths), finished=True)
            self._dispatcher.returned(index, output.group_id, progress, now)

    async def _probe_beside(self) -> None:
        """Ask for first tokens, one after the other, until all groups are done; the last may wait for them."""
        number = 0
        await asyncio.sleep(_PROBE_EVERY_S / 10)  # the load comes first
        while not self._over.is_set():
            self._observed.first_token_s.append(await probe(self._engines, self._work, number))
            number += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _PROBE_EVERY_S)
