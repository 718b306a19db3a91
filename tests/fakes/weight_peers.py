"""Both ends of hand-overs over Ray without a model: a trainer that sends made-up tensors, and engines that hold them.

Version v of tensor i is full of the number 10 v + i. A file `fault-<engine>` in the engines' folder (see
`tests.fakes.scripted_engine`) takes effect in the second bucket, for that process of the engine: `break-once` (one
hand-over fails), `break-later` (the one after the next does), `break` (every one does), `die` (the process is killed),
`stop` (it is stopped), `stuck` (it answers nothing any more), `lose` (the bucket is received and forgotten).
"""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from megappo.cluster.runtime import Call, gather
from megappo.device.backend import CPU
from megappo.device.process_group import destroy_named_group, init_named_group, named_group
from megappo.errors import EngineError
from megappo.rollout.engine import EngineSpec, WeightGroup
from megappo.weight_sync import TRANSPORTS
from megappo.weight_sync.source import WeightSource
from megappo.weight_sync.transport import Bucket, SenderSpec, WeightSender
from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.checksums import HeldPart, HeldTensor, checksum
from megappo.weights.delivery import Delivery, FolderDelivery, GroupDelivery, SharedDelivery
from megappo.weights.name_map import Partition
from megappo.weights.safetensors_io import HuggingFaceWeights
from megappo.weights.shared_bucket import open_shared_bucket
from tests.fakes.scripted_engine import ScriptedEngine

NAMES = ["a", "b", "c"]
BUCKETS = [BucketMeta(names=[name], shapes=[[2, 2]], dtype="float32", num_bytes=16) for name in NAMES]


def content(version: int, name: str) -> torch.Tensor:
    """Return a tensor of a version."""
    return torch.full((2, 2), 10.0 * version + NAMES.index(name))


class HoldingEngine(ScriptedEngine):
    """A scripted engine that takes weights; named `tests.fakes.weight_peers:HoldingEngine` in rollout.engine."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._held: dict[str, torch.Tensor] = {}
        self._buckets = 0
        self._broken_once = False
        self._spared = 0
        """Hand-overs that `break-later` has left alone."""

    async def join_weight_group(self, group: WeightGroup) -> None:
        await asyncio.to_thread(
            init_named_group,
            name=group.name,
            address=group.address,
            port=group.port,
            world_size=group.world_size,
            rank=group.rank_offset,
            backend=CPU,
            timeout_s=20.0,
        )

    async def leave_weight_group(self, name: str) -> None:
        destroy_named_group(name)

    async def held_tensors(self) -> list[HeldTensor]:
        return [HeldTensor(name=name, parts=(HeldPart(name=name, dim=0, start=0, stop=2),)) for name in NAMES]

    async def health(self) -> None:
        if self._fault() == "stuck":
            await asyncio.sleep(3600)

    async def begin_weights(self) -> None:
        self._buckets = 0

    async def load_weights(self, bucket: BucketMeta, *, delivery: Delivery) -> None:
        self._buckets += 1
        fault = self._fault() if self._buckets == 2 or isinstance(delivery, FolderDelivery) else ""
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stuck":
            await asyncio.sleep(3600)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "break-later":
            self._spared += 1
            fault = "break-once" if self._spared > 1 else ""
        if fault == "break" or (fault == "break-once" and not self._broken_once):
            self._broken_once = True
            raise EngineError(f"{self._name}: load weights: out of ink")
        tensors = await asyncio.to_thread(_receive, bucket, delivery)
        if fault != "lose":
            self._held |= tensors

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        return {name: checksum(self._held[name]) for name in names if name in self._held}

    async def end_weights(self, version: int) -> None:
        await super().end_weights(version)
        numbers = {name: self._held[name][0, 0].item() for name in NAMES}
        self._note(f"version {version}: {numbers}")


def _receive(bucket: BucketMeta, delivery: Delivery) -> dict[str, torch.Tensor]:
    match delivery:
        case GroupDelivery(group=group):
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=named_group(group))
            return open_bucket(bucket, flat)
        case SharedDelivery(payloads=payloads):
            return {name: tensor.clone() for name, tensor in open_shared_bucket(payloads[0]).items()}
        case FolderDelivery(path=path):
            with HuggingFaceWeights(path) as weights:
                return {name: weights.read(name, Partition.replicated, rank=0, size=1) for name in weights.names()}


@ray.remote
class _Sender:
    """The part of `cluster.workers.ActorWorker` that hands weights over."""

    def __init__(self, transport: str) -> None:
        self._transport = TRANSPORTS.get(transport)
        self._version = 1
        self._fails = False
        self._sender: WeightSender | None = None
        self._ended = 0

    def ended_exports(self) -> int:
        return self._ended

    def shared_mappings(self) -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")

    def set(self, version: int, fails: bool) -> None:
        self._version, self._fails = version, fails

    def node(self) -> str:
        return "127.0.0.1"

    def plan_export(self) -> tuple[int, bool, bool, list[BucketMeta]]:
        return 0, True, True, BUCKETS

    def rendezvous(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", probe.getsockname()[1]

    def open_sender(self, spec: SenderSpec) -> None:
        self._sender = self._transport.sender(spec)
        self._sender.open()

    def close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def begin_sending(self, wanted: list[HeldTensor]) -> None:
        self._source = WeightSource(self._export(), self._sender, wanted=wanted)

    def _export(self) -> Iterator[Bucket]:
        for bucket in BUCKETS:
            if self._fails and bucket is BUCKETS[1]:
                raise ValueError("the weights are gone")
            yield bucket, content(self._version, bucket.names[0]).view(-1).view(torch.uint8)
        self._ended += 1

    def send_bucket(self) -> dict[int, bytes]:
        return self._source.send_next()

    def send_weights(self) -> dict[str, str]:
        return self._source.send_rest()

    def drop_weights(self) -> None:
        self._source.drop_rest()


class SendingTrainer:
    """In the place of `cluster.groups.ActorGroup`, with one rank."""

    def __init__(self, transport: str) -> None:
        self._sender: Any = _Sender.options(num_cpus=0).remote(transport)
        self.num_updates = 0

    def train(self, version: int, *, fails: bool = False) -> None:
        """Let the next hand-over be of these weights, or fail in the trainer."""
        ray.get(self._sender.set.remote(version, fails))
        self.num_updates += 1

    def ended_exports(self) -> int:
        """Return how many exports were iterated to their end: what ranks that feed another one wait for."""
        return ray.get(self._sender.ended_exports.remote())

    def shared_mappings(self) -> int:
        """Return how many pieces of memory the trainer's process shares with others, or did and has not given up."""
        return ray.get(self._sender.shared_mappings.remote())

    def call(self, rank: int, method: str, *args: Any) -> Call:
        ref = getattr(self._sender, method).remote(*args)
        return Call(ref=ref, worker=f"actor rank {rank}", log_paths=(Path("none"),))

    def calls(self, method: str, *args: Any) -> list[Call]:
        return [self.call(0, method, *args)]

    def run(self, method: str, *args: Any) -> list[Any]:
        return gather(self.calls(method, *args), phase=method, timeout_s=60.0)
