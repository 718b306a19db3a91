"""One attempt at handing the weights over to some engines: groups, senders, buckets, checksums.

Sources and engines work at the same time; `megappo.weight_sync.receive` holds the order of an engine's side. A group
whose broadcast broke is dead, so after a failure, and whenever the engines are others than the last time, new groups
are joined, named with a generation number. An attempt has one deadline for all its calls, however many buckets and
sources there are.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megappo.cluster.groups import ActorGroup
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.runtime import Call, gather
from megappo.cluster.weight_calls import EngineCall, Failure, causes, settle
from megappo.config.run import RunConfig
from megappo.device.backend import Backend
from megappo.errors import CapabilityError, WorkerError, listed
from megappo.rollout.engine import WeightGroup
from megappo.weight_sync import TRANSPORTS
from megappo.weight_sync.disk import VersionFolder
from megappo.weight_sync.receive import Load
from megappo.weight_sync.transport import Flow, SenderSpec
from megappo.weights.buckets import BucketMeta
from megappo.weights.checksums import HeldTensor
from megappo.weights.delivery import Delivery, FolderDelivery, GroupDelivery, SharedDelivery

_ANSWER_S = 5.0
"""What an answer may take over the engine's own deadline, which comes first and says more."""
_LEAVE_S = 5.0
"""How long engines may take to leave groups that are given up."""


class AttemptFailed(Exception):
    """An attempt failed; an engine that it had begun with is of no use until another one ends well."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.causes = causes(failures)
        super().__init__(str(self.causes[0].error))


@dataclass(kw_only=True, slots=True, frozen=True)
class _Source:
    """A rank of the trainer that sends weights."""

    name: str
    rank: int
    buckets: list[BucketMeta]

    def load(self, number: int, delivery: Delivery) -> Load:
        """Return what engines get of bucket `number` (from 1)."""
        bucket = self.buckets[number - 1]
        return Load(source=self.name, number=number, of=len(self.buckets), bucket=bucket, delivery=delivery)


class HandOver:
    """The sources of a run, and the engines that they are connected to. Several attempts may be made, one at a time."""

    def __init__(
        self, config: RunConfig, *, actor: ActorGroup, rollout: RolloutPool, backend: Backend, folder: Path
    ) -> None:
        """Ask the trainer's ranks for their part. `folder` is where a transport that stores writes."""
        self._settings = config.weight_sync
        self._dtype = config.rollout.weight_dtype(config.model).value
        self._width = config.rollout.tensor
        self._actor = actor
        self._rollout = rollout
        self._backend = backend
        plans = actor.run("plan_export")
        self._feeding = [rank for rank, (_, takes_part, _, _) in enumerate(plans) if takes_part]
        self._sources = [
            _Source(name=f"weights-{place}", rank=rank, buckets=buckets)
            for place, rank, buckets in sorted(
                (place, rank, buckets) for rank, (place, _, sends, buckets) in enumerate(plans) if sends
            )
        ]
        self._buckets = [bucket for source in self._sources for bucket in source.buckets]
        self.num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        self._flow = TRANSPORTS.get(self._settings.transport).flow
        self._versions = VersionFolder(folder, source=Path(config.model.path))
        self._lives: Mapping[int, int] = {}
        """Numbers of the processes of the engines that the attempt under way is made with."""
        self._connected: Mapping[int, int] = {}
        """The same of the engines to which the open senders send; none after a failure."""
        self._groups: list[str] = []
        self._generation = 0
        self._deadline = 0.0
        if self._flow is Flow.handed:
            self._require_one_machine()

    def sent_names(self) -> list[set[str]]:
        """Return the names of the tensors that each source sends."""
        return [{name for bucket in source.buckets for name in bucket.names} for source in self._sources]

    def _require_one_machine(self) -> None:
        calls = [*self._actor.calls("node"), *self._rollout.calls("node")]
        nodes = set(gather(calls, phase="node", timeout_s=self._settings.timeout_s, key="weight_sync.timeout_s"))
        if len(nodes) > 1:
            raise CapabilityError(
                f"weight_sync.transport={self._settings.transport} shares memory between trainer and engines, and they "
                f"run on {', '.join(sorted(nodes))} (use weight_sync.transport=broadcast or disk, or one machine)"
            )

    def _begin_time(self) -> None:
        """From now on `weight_sync.timeout_s` counts."""
        self._deadline = time.monotonic() + self._settings.timeout_s

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic()) + _ANSWER_S

    # Connections

    def _connect(self, version: int) -> None:
        """Open senders to the engines, unless they are. Raises AttemptFailed."""
        if self._lives == self._connected and self._flow is Flow.streamed:
            return
        self._disconnect()
        self._generation += 1
        self._connected = self._lives
        self._begin_time()
        folder = self._versions.start(version) if self._flow is Flow.stored else None
        files = iter(self._versions.files(len(self._buckets)))
        for source in self._sources:
            name = f"{source.name}-{self._generation}"
            spec = SenderSpec(
                name=name,
                engine_ranks=self._width * len(self._lives),
                folder=folder,
                files=[next(files) for _ in source.buckets],
                backend=self._backend,
                timeout_s=self._settings.timeout_s,
            )
            self._open(source, spec)

    def _open(self, source: _Source, spec: SenderSpec) -> None:
        """Open one sender and, where there is a group, have the engines join it."""
        joins: list[EngineCall] = []
        if self._flow is Flow.streamed:
            meeting = [self._actor.call(source.rank, "rendezvous")]
            left_s = self._left_s()
            place = gather(meeting, phase="weight group", timeout_s=left_s, key="weight_sync.timeout_s")[0]
            spec = spec.at(*place)
            self._groups.append(spec.name)
            joins = [
                self._engine_call(engine, "join_weight_group", self._member(spec, position))
                for position, engine in enumerate(self._lives)
            ]
        self._settle([self._actor.call(source.rank, "open_sender", spec)], joins, "join")

    def _member(self, spec: SenderSpec, position: int) -> WeightGroup:
        return WeightGroup(
            name=spec.name,
            address=spec.address,
            port=spec.port,
            world_size=1 + spec.engine_ranks,
            rank_offset=1 + position * self._width,
            backend=self._backend.dist_backend,
        )

    def _disconnect(self) -> None:
        """Close what is open. Peers that wait in a group fail by that; what fails here was broken before."""
        leaving = [
            self._rollout.call(engine, "leave_weight_group", group)
            for engine, life in self._connected.items()
            for group in self._groups
            if self._rollout.lives().get(engine) == life
        ]
        closing = [self._actor.call(source.rank, "close_sender") for source in self._sources]
        refs = [call.ref for call in (*leaving, *closing)]
        ray.wait(refs, num_returns=len(refs), timeout=_LEAVE_S)
        self._connected, self._groups = {}, []

    # Attempts

    def attempt(self, lives: Mapping[int, int], version: int, wanted: Sequence[HeldTensor]) -> dict[str, str]:
        """Hand the trainer's weights over to engines, and compare the wanted tensors. From begin to end it takes
        `weight_sync.timeout_s` at most, and so does joining groups before it, where there are new ones.

        Args:
            lives: the engines, and the numbers of their processes.

        Returns:
            The checksums of the wanted tensors.

        Raises:
            AttemptFailed: of an engine or of the trainer.
        """
        self._lives = dict(lives)
        try:
            self._connect(version)
            self._begin_time()
            ready = [self._actor.call(rank, "begin_sending", list(wanted)) for rank in self._feeding]
            self._settle(ready, self._engine_calls("begin_weights", version), "begin")
            deliver = {
                Flow.streamed: self._stream,
                Flow.handed: self._hand,
                Flow.stored: self._store,
            }[self._flow]
            sent = deliver(version)
            self._close(sent, wanted)
        except AttemptFailed:
            self._disconnect()
            raise
        if self._flow is Flow.stored:
            self._versions.keep(version)
        if self._flow is Flow.handed:
            self._disconnect()  # senders would keep the memory of their last bucket until the next hand-over
        return sent

    def load_kept(self, lives: Mapping[int, int], version: int, sent: dict[str, str]) -> bool:
        """Have engines load the version from where it is stored, and compare. Returns whether it is stored.

        Raises:
            AttemptFailed: of an engine.
        """
        if self._flow is not Flow.stored:
            return False
        self._lives = dict(lives)
        self._begin_time()
        self._settle([], self._engine_calls("begin_weights", version), "begin")
        self._load([self._stored_load(version)])
        self._settle([], self._engine_calls("close_weights", sent), "close")
        return True

    def _stream(self, version: int) -> dict[str, str]:
        """Have the engines receive what is being sent."""
        # The sources first: an engine that waits for a bucket nobody sends is stuck until its deadline.
        sending = [self._actor.call(rank, "send_weights") for rank in self._feeding]
        loads = [
            source.load(number, GroupDelivery(group=group))
            for source, group in zip(self._sources, self._groups)
            for number in range(1, len(source.buckets) + 1)
        ]
        receiving = self._engine_calls("load_weights", loads)
        return _joined(self._settle(sending, receiving, "weight hand-over", freeing=True))

    def _hand(self, version: int) -> dict[str, str]:
        """Have the engines open bucket after bucket. A rank feeds others while it gathers its own, so every rank is
        kept going that does not hold a bucket of its own, also when an engine fails."""
        try:
            return self._hand_all()
        except AttemptFailed:
            # Not waited for: whatever these ranks are asked next comes after it.
            for source in self._sources:
                self._actor.call(source.rank, "drop_weights")
            raise

    def _hand_all(self) -> dict[str, str]:
        senders = {source.rank for source in self._sources}
        finishing = [self._actor.call(rank, "send_weights") for rank in self._feeding if rank not in senders]
        first = {source.rank: self._actor.call(source.rank, "send_bucket") for source in self._sources}
        for source in self._sources:
            laid_out = first[source.rank]
            for number in range(1, len(source.buckets) + 1):
                payloads: dict[int, bytes] = self._settle([laid_out], [], "send bucket")[0]
                calls: list[EngineCall] = []
                for position, engine in enumerate(self._lives):
                    ranks = range(position * self._width, (position + 1) * self._width)
                    delivery = SharedDelivery(payloads=[payloads[rank] for rank in ranks])
                    calls.append(self._engine_call(engine, "load_weights", [source.load(number, delivery)]))
                self._settle([], calls, "weight hand-over")
                if number < len(source.buckets):
                    laid_out = self._actor.call(source.rank, "send_bucket")
            finishing.append(self._actor.call(source.rank, "send_weights"))
        return _joined(self._settle(finishing, [], "send weights"))

    def _store(self, version: int) -> dict[str, str]:
        """Write everything, then have the engines load it."""
        sending = [self._actor.call(rank, "send_weights") for rank in self._feeding]
        sent = _joined(self._settle(sending, [], "write weights"))
        self._versions.finish(version, self._buckets, dtype=self._dtype)
        self._load([self._stored_load(version)])
        return sent

    def _stored_load(self, version: int) -> Load:
        """Return the load of a whole folder: one bucket that stands for all."""
        bucket = BucketMeta(
            names=[name for bucket in self._buckets for name in bucket.names],
            shapes=[shape for bucket in self._buckets for shape in bucket.shapes],
            dtype=self._dtype,
            num_bytes=self.num_bytes,
        )
        folder = self._versions.path(version)
        return Load(source=folder.name, number=1, of=1, bucket=bucket, delivery=FolderDelivery(path=folder))

    def _load(self, loads: list[Load]) -> None:
        self._settle([], self._engine_calls("load_weights", loads), "weight hand-over")

    def _close(self, sent: dict[str, str], wanted: Sequence[HeldTensor]) -> None:
        if unsent := sorted({tensor.name for tensor in wanted} - sent.keys()):
            raise WorkerError(
                f"weight hand-over: the engines hold {len(unsent)} tensors that are not sent ({listed(unsent)})"
            )
        self._settle([], self._engine_calls("close_weights", sent), "close")

    def _engine_calls(self, method: str, *args: Any) -> list[EngineCall]:
        return [self._engine_call(engine, method, *args) for engine in self._lives]

    def _engine_call(self, engine: int, method: str, *args: Any) -> EngineCall:
        return EngineCall(engine=engine, life=self._lives[engine], call=self._rollout.call(engine, method, *args))

    def _settle(
        self, trainer: Sequence[Call], engines: Sequence[EngineCall], phase: str, *, freeing: bool = False
    ) -> list[Any]:
        """Return the trainer's answers. Raises AttemptFailed, after closing what others wait in where `freeing`."""
        on_failure: Callable[[], None] = self._disconnect if freeing else lambda: None
        answers, failures = settle(
            trainer,
            engines,
            phase=phase,
            timeout_s=round(self._left_s(), 1),
            limit=f" (weight_sync.timeout_s={self._settings.timeout_s:g} for all of the hand-over)",
            on_failure=on_failure,
        )
        if failures:
            raise AttemptFailed(failures)
        return answers


def _joined(checksums: Sequence[dict[str, str]]) -> dict[str, str]:
    return {name: value for part in checksums for name, value in part.items()}
