"""The engine's side of one hand-over: what is asked of it, in which order, within which time.

begin -> load, bucket by bucket -> close (verify, end, ask for the version). The sources send elsewhere and must have
been started: a broadcast ends only when everyone takes part.

Invariants: one call at a time; all calls together end within one deadline, however many buckets there are; after
`close` the engine answers with the version; after a failure the error names source, bucket and phase, and an engine
that had begun generates nothing until a later hand-over ends well (its own port sees to it).
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from megappo.errors import EngineError, MegappoError, listed
from megappo.weights.buckets import BucketMeta
from megappo.weights.delivery import Delivery

T = TypeVar("T")


class WeightReceiver(Protocol):
    """What a hand-over asks of an engine."""

    async def begin_weights(self) -> None: ...

    async def load_weights(self, bucket: BucketMeta, *, delivery: Delivery) -> None: ...

    async def checksums(self, names: Sequence[str]) -> dict[str, str]: ...

    async def end_weights(self, version: int) -> None: ...

    async def weight_version(self) -> int: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Load:
    """One bucket on its way to an engine."""

    source: str
    """Name of what sends it."""
    number: int
    """Of the bucket among those of the source, from 1."""
    of: int
    bucket: BucketMeta
    delivery: Delivery


class Reception:
    """One hand-over to one engine. Every step raises EngineError, naming it, when it fails or is late."""

    def __init__(self, engine: WeightReceiver, version: int, *, timeout_s: float) -> None:
        """`timeout_s` is the time of all calls together, from now on."""
        self._engine = engine
        self._version = version
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    async def begin(self) -> None:
        """Pause the engine and open the hand-over."""
        await self._bounded("begin", self._engine.begin_weights())

    async def load(self, loads: Sequence[Load]) -> None:
        """Load buckets in order."""
        for load in loads:
            where = f"source {load.source}: bucket {load.number} of {load.of} (from {load.bucket.names[0]}): load"
            await self._bounded(where, self._engine.load_weights(load.bucket, delivery=load.delivery))

    async def close(self, sent: Mapping[str, str]) -> None:
        """Compare with the checksums of what was `sent`, then let the engine go on under the new version."""
        if sent:
            held = await self._bounded("verify", self._engine.checksums(list(sent)))
            compare_checksums(sent, held, where=f"weight hand-over {self._version}: verify")
        await self._bounded("end", self._engine.end_weights(self._version))
        answer = await self._bounded("version", self._engine.weight_version())
        if answer != self._version:
            raise EngineError(f"weight hand-over {self._version}: version: the engine answers with {answer}")

    async def _bounded(self, step: str, call: Awaitable[T]) -> T:
        where = f"weight hand-over {self._version}: {step}"
        try:
            return await asyncio.wait_for(call, max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise EngineError(
                f"{where}: not done within {self._timeout_s:g} s of the begin (weight_sync.timeout_s, for all of it)"
            ) from None
        except MegappoError as error:
            raise EngineError(f"{where}: {error}") from error


def compare_checksums(sent: Mapping[str, str], held: Mapping[str, str], *, where: str) -> None:
    """Raise EngineError naming the tensors that the engine holds otherwise than they were sent, or does not hold."""
    different = sorted(name for name, value in sent.items() if name in held and held[name] != value)
    missing = sorted(sent.keys() - held.keys())
    problems = [
        f"{len(names)} of {len(sent)} tensors {what} ({listed(names)})"
        for names, what in ((different, "differ from what was sent"), (missing, "cannot be read back"))
        if names
    ]
    if problems:
        raise EngineError(f"{where}: {' and '.join(problems)}")
