"""An engine under test and its hand-overs: what `cluster.hand_over` does over Ray, from one process."""

import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from megappo.config.rollout import SamplingConfig
from megappo.device.backend import CPU
from megappo.rollout.engine import GenerateRequest, GroupOutput, RolloutEngine, WeightGroup
from megappo.weight_sync import TRANSPORTS
from megappo.weight_sync.disk import VersionFolder
from megappo.weight_sync.receive import Load, Reception
from megappo.weight_sync.transport import Flow, SenderSpec
from megappo.weights.buckets import BucketMeta
from megappo.weights.checksums import HeldTensor
from megappo.weights.delivery import Delivery, FolderDelivery, GroupDelivery, SharedDelivery
from tests.rollout.trainer_process import ANSWER_S, Sources, Trainer, free_port, plan_sources

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

TIMEOUT_S = 30.0


@dataclasses.dataclass(kw_only=True)
class Subject:
    """One engine, and the trainer that hands weights over to it."""

    engine: RolloutEngine
    run: Run[Any]
    trainer: Trainer
    folder: Path
    """Where a transport that stores writes; its model folder is `source`."""
    source: Path
    ranks: int = 1
    groups: list[str] = dataclasses.field(default_factory=list[str])
    version: int = 0
    senders: int = 0

    def generate(
        self, requests: list[GenerateRequest], sampling: SamplingConfig, *, seed: int = 0
    ) -> list[GroupOutput]:
        """Return all groups, by group id."""

        async def collect() -> list[GroupOutput]:
            return [output async for output in self.engine.generate(requests, sampling, seed=seed)]

        return sorted(self.run(collect()), key=lambda output: output.group_id)

    def join(self, name: str, *, transport: str = "broadcast", timeout_s: float = ANSWER_S) -> None:
        """Open a sender of a transport over a group, which the engine joins."""
        spec = self._spec(name, timeout_s=timeout_s).at("127.0.0.1", free_port())
        self.trainer.start("open", transport=transport, spec=spec)
        member = WeightGroup(
            name=name,
            address=spec.address,
            port=spec.port,
            world_size=1 + self.ranks,
            rank_offset=1,
            backend="gloo",
        )
        self.run(self.engine.join_weight_group(member))
        self.trainer.finish()
        self.groups.append(name)

    def leave(self, name: str) -> None:
        """Undo `join`."""
        self.groups.remove(name)
        self.run(self.engine.leave_weight_group(name))
        self.trainer.ask("close", name=name)

    def _spec(self, name: str, *, timeout_s: float = ANSWER_S, **options: Any) -> SenderSpec:
        return SenderSpec(name=name, engine_ranks=self.ranks, backend=CPU, timeout_s=timeout_s, **options)

    def hand_over(
        self,
        folder: Path,
        *,
        transport: str = "broadcast",
        sources: Sources | None = None,
        wanted: list[HeldTensor] | None = None,
    ) -> int:
        """Give the engine the weights of a folder under the next version, comparing all tensors unless some are
        `wanted`; returns the version."""
        flow = TRANSPORTS.get(transport).flow
        if sources is None:
            sources = plan_sources(folder, self.groups if flow is Flow.streamed else [f"{transport}-{self.senders}"])
        compared: list[HeldTensor] = self.run(self.engine.held_tensors()) if wanted is None else wanted
        self.version += 1
        reception = Reception(self.engine, self.version, timeout_s=TIMEOUT_S)
        self.run(reception.begin())
        deliver = {Flow.streamed: self._stream, Flow.handed: self._hand, Flow.stored: self._store}[flow]
        sent = deliver(reception, folder, sources, compared, transport=transport)
        self.run(reception.close(sent))
        return self.version

    def _stream(
        self, reception: Reception, folder: Path, sources: Sources, wanted: list[HeldTensor], *, transport: str
    ) -> dict[str, str]:
        del transport
        loads = group_loads(sources)
        self.trainer.start("send", folder=folder, sources=sources, wanted=wanted)
        try:
            self.run(reception.load(loads))
        finally:
            sent = self.trainer.finish()
        return sent

    def _hand(
        self, reception: Reception, folder: Path, sources: Sources, wanted: list[HeldTensor], *, transport: str
    ) -> dict[str, str]:
        sent: dict[str, str] = {}
        for name, buckets in sources.items():
            self.trainer.ask("open", transport=transport, spec=self._spec(name))
            self.trainer.ask("begin", folder=folder, name=name, buckets=buckets, wanted=wanted)
            for number in range(len(buckets)):
                payloads = self.trainer.ask("send_next")
                delivery = SharedDelivery(payloads=[payloads[rank] for rank in range(self.ranks)])
                self.run(reception.load([loads_of(name, buckets, [delivery] * len(buckets))[number]]))
            sent |= self.trainer.ask("send_rest")
            self.trainer.ask("close", name=name)
        return sent

    def _store(
        self, reception: Reception, folder: Path, sources: Sources, wanted: list[HeldTensor], *, transport: str
    ) -> dict[str, str]:
        store = VersionFolder(self.folder, source=self.source)
        buckets = [bucket for each in sources.values() for bucket in each]
        partial, files = store.start(self.version), iter(store.files(len(buckets)))
        for name, each in sources.items():
            spec = self._spec(name, folder=partial, files=[next(files) for _ in each])
            self.trainer.ask("open", transport=transport, spec=spec)
        sent = self.trainer.ask("send", folder=folder, sources=sources, wanted=wanted)
        path = store.finish(self.version, buckets, dtype=buckets[0].dtype)
        whole = BucketMeta(
            names=[name for bucket in buckets for name in bucket.names],
            shapes=[shape for bucket in buckets for shape in bucket.shapes],
            dtype=buckets[0].dtype,
            num_bytes=sum(bucket.num_bytes for bucket in buckets),
        )
        self.run(reception.load(loads_of(path.name, [whole], [FolderDelivery(path=path)])))
        store.keep(self.version)
        return sent


def loads_of(source: str, buckets: list[BucketMeta], deliveries: list[Delivery]) -> list[Load]:
    """Return what an engine gets of a source."""
    return [
        Load(source=source, number=number, of=len(buckets), bucket=bucket, delivery=delivery)
        for number, (bucket, delivery) in enumerate(zip(buckets, deliveries, strict=True), start=1)
    ]


def group_loads(sources: Sources) -> list[Load]:
    """Return what an engine gets of sources that send over groups of their names."""
    return [
        load
        for name, buckets in sources.items()
        for load in loads_of(name, buckets, [GroupDelivery(group=name)] * len(buckets))
    ]
