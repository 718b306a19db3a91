"""The weights of the transformers engine: joined groups, and tensors copied into its parameters by name."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from megappo.config.rollout import PauseMode
from megappo.device.backend import Backend
from megappo.device.process_group import destroy_named_group, init_named_group, named_group
from megappo.errors import EngineError
from megappo.rollout.engine import WeightGroup
from megappo.rollout.hf_parameters import folder_parameters
from megappo.rollout.weight_update import WeightUpdate, refuse_other_shapes
from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.checksums import HeldPart, HeldTensor, checksum
from megappo.weights.delivery import Delivery, FolderDelivery, GroupDelivery, SharedDelivery
from megappo.weights.name_map import Partition
from megappo.weights.safetensors_io import HuggingFaceWeights
from megappo.weights.shared_bucket import open_shared_bucket

T = TypeVar("T", covariant=True)


class RunInThread(Protocol):
    """Runs blocking work in the engine's thread within a time. Raises EngineError naming the phase."""

    def __call__(self, phase: str, work: Callable[[], T], timeout_s: float) -> Awaitable[T]: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelThread:
    """The one thread that works on the model, and how it is taken from generation."""

    run: RunInThread
    model_free: asyncio.Lock
    """Held while a batch is sampled, and from `begin` to the end of a complete hand-over."""
    abort: Callable[[], Awaitable[None]]
    """Ends the batch under way."""


class HFWeights:
    """The weight half of the transformers engine. `update` tells whether the weights may be used.

    All tensors can be read back, under the names of a model folder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        backend: Backend,
        thread: ModelThread,
        pause: PauseMode,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the deadline of every call."""
        names = set(folder_parameters(model, remove_duplicate=True))
        # A parameter under two names (a tied head) may come under either, and must come under its first.
        aliases = set(folder_parameters(model)) - names
        self.update = WeightUpdate(name=name, required=names, optional=aliases)
        self.version = 0
        self._model = model
        self._name = name
        self._backend = backend
        self._thread = thread
        self._pause = pause
        self._timeout_s = timeout_s
        self._groups: list[str] = []

    async def join_group(self, group: WeightGroup) -> None:
        """Join a weight group as rank `rank_offset`."""
        if group.backend != self._backend.dist_backend:
            raise EngineError(
                f"{self._name}: join weight group: {group.name} uses {group.backend}, and an engine on "
                f"{self._backend.kind} needs {self._backend.dist_backend}"
            )
        join = partial(
            init_named_group,
            name=group.name,
            address=group.address,
            port=group.port,
            world_size=group.world_size,
            rank=group.rank_offset,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        await self._run("join weight group", join)
        self._groups.append(group.name)

    async def leave_group(self, name: str) -> None:
        """Leave a weight group, if it was joined; a bucket that is being received fails with it."""
        destroy_named_group(name)
        if name in self._groups:
            self._groups.remove(name)

    def leave_all(self) -> None:
        """Leave all weight groups."""
        for name in self._groups:
            destroy_named_group(name)
        self._groups.clear()

    async def begin(self) -> None:
        """Wait for the batch under way, or end it; keep others from starting."""
        if not self.update.in_progress:
            if self._pause is PauseMode.abort:
                await self._thread.abort()
            try:
                await asyncio.wait_for(self._thread.model_free.acquire(), self._timeout_s)
            except TimeoutError:
                raise EngineError(
                    f"{self._name}: begin weights: not done within {self._timeout_s:g} s, since a batch is under way "
                    "(raise weight_sync.timeout_s, or abort it first)"
                ) from None
        self.update.begin()

    async def load(self, bucket: BucketMeta, delivery: Delivery) -> None:
        """Receive one bucket and copy what has a known name into the parameters."""
        self.update.receive(bucket.names)
        if isinstance(delivery, GroupDelivery) and delivery.group not in self._groups:
            raise EngineError(f"{self._name}: load weights: the group {delivery.group} was not joined")
        await self._run("load weights", partial(self._load, bucket, delivery))

    @torch.no_grad()
    def _load(self, bucket: BucketMeta, delivery: Delivery) -> None:
        parameters = folder_parameters(self._model)
        tensors = _receive(bucket, delivery, device=self._model.device)
        shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
        refuse_other_shapes(self._name, [(name, list(tensor.shape)) for name, tensor in tensors.items()], shapes)
        for name, tensor in tensors.items():
            if name in parameters:  # others are reported when the hand-over ends
                parameters[name].copy_(tensor)

    def held_tensors(self) -> list[HeldTensor]:
        """Return the parameters, each one tensor of the folder."""
        parameters = folder_parameters(self._model, remove_duplicate=True)
        return [
            HeldTensor(name=name, parts=(HeldPart(name=name, dim=0, start=0, stop=len(tensor)),))
            for name, tensor in sorted(parameters.items())
        ]

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksums of parameters."""

        def compute() -> dict[str, str]:
            parameters = folder_parameters(self._model)
            return {name: checksum(parameters[name]) for name in names if name in parameters}

        return await self._run("verify weights", compute)

    async def end(self, version: int) -> None:
        """Check that the hand-over was complete, then go on generating. There is no cache between batches."""
        self.update.check_names()
        self.version = version
        self.update.complete()
        self._thread.model_free.release()

    async def _run(self, phase: str, work: Callable[[], T]) -> T:
        return await self._thread.run(phase, work, self._timeout_s)


def _receive(bucket: BucketMeta, delivery: Delivery, *, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of a bucket."""
    match delivery:
        case GroupDelivery(group=group):
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
            dist.broadcast(flat, src=0, group=named_group(group))
            return open_bucket(bucket, flat)
        case SharedDelivery(payloads=payloads):
            return open_shared_bucket(payloads[0])
        case FolderDelivery(path=path):
            with HuggingFaceWeights(path) as weights:
                return {name: weights.read(name, Partition.replicated, rank=0, size=1) for name in weights.names()}
