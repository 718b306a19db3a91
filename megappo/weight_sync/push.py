"""The engines' side of one hand-over: what is asked of them, in which order, within which time.

The sources send elsewhere and must have been started: a broadcast ends only when everyone takes part.

Invariants: one call at a time per engine; all engines are asked together; after success all engines answer with the
version; after a failure the error names engine, stage, bucket and phase, and the engines that had begun generate
nothing until a later hand-over ends well (their own port sees to it).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megappo.errors import EngineError
from megappo.weights.buckets import BucketMeta

T = TypeVar("T")


class WeightReceiver(Protocol):
    """What a hand-over asks of an engine."""

    async def begin_weights(self) -> None: ...

    async def load_weights(self, bucket: BucketMeta, *, group: str) -> None: ...

    async def end_weights(self, version: int) -> None: ...

    async def weight_version(self) -> int: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class StageSource:
    """What one pipeline stage of the trainer sends."""

    group: str
    """The group that the stage's sender and the engines have joined."""
    buckets: Sequence[BucketMeta]
    """In the order in which they are sent."""


async def push_weights(
    engines: Sequence[WeightReceiver], stages: Sequence[StageSource], version: int, *, timeout_s: float
) -> None:
    """Let all engines receive the weights of all stages, stage by stage.

    Args:
        timeout_s: deadline of each step: opening, each bucket, closing, asking for the version.

    Raises:
        EngineError: an engine failed or was late, or answers with another version.
    """

    async def ask_all(step: str, call: Callable[[WeightReceiver], Coroutine[Any, Any, T]]) -> list[T]:
        where = f"weight hand-over {version}: {step}"
        return await _ask_all(engines, call, where=where, timeout_s=timeout_s)

    await ask_all("begin", lambda engine: engine.begin_weights())
    for stage in stages:
        for number, bucket in enumerate(stage.buckets, start=1):
            step = f"stage {stage.group}: bucket {number} of {len(stage.buckets)} (from {bucket.names[0]}): load"
            await ask_all(step, _loader(bucket, stage.group))
    await ask_all("end", lambda engine: engine.end_weights(version))
    answers = await ask_all("version", lambda engine: engine.weight_version())
    wrong = [f"engine {index} with {answer}" for index, answer in enumerate(answers) if answer != version]
    if wrong:
        raise EngineError(f"weight hand-over {version}: version: answered {', '.join(wrong)}")


def _loader(bucket: BucketMeta, group: str) -> Callable[[WeightReceiver], Coroutine[Any, Any, None]]:
    return lambda engine: engine.load_weights(bucket, group=group)


async def _ask_all(
    engines: Sequence[WeightReceiver],
    call: Callable[[WeightReceiver], Coroutine[Any, Any, T]],
    *,
    where: str,
    timeout_s: float,
) -> list[T]:
    """Make one call on every engine together; the first failure ends the wait for the others."""
    tasks = {asyncio.create_task(call(engine)): f"engine {index}" for index, engine in enumerate(engines)}
    try:
        done, late = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            # Whatever it is (also a remote engine's death): it is passed on, with the engine and the step.
            if (error := task.exception()) is not None:
                raise EngineError(f"{where}: {tasks[task]}: {error}") from error
        if late:
            names = ", ".join(tasks[task] for task in tasks if task in late)
            raise EngineError(f"{where}: {names}: not done within {timeout_s:g} s")
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
