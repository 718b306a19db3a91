"""Megatron weights out, under their Hugging Face names: bucket by bucket for engines, and as a model folder.

`megappo.weights.plan` says which rank sends which tensors, who feeds them and in which buckets; here it is done. The
shards of a bucket go to its sender, point to point and all at once, or are written into its memory
(`shared_gather`); the other ranks have nothing but their own.

Of a layer with an adapter the sum of weight and update is exported, made piece by piece; the model stays as it is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.models.gpt import ValueModel
from megappo.models.lora import updates_of
from megappo.models.low_rank import LowRankUpdate
from megappo.models.parameters import mapped_parameters, shards_of, unwrap
from megappo.models.shared_gather import BufferGuest, BufferOwner, new_buffer
from megappo.models.weight_shapes import weights_of
from megappo.weights.buckets import BucketMeta, open_bucket, torch_dtype
from megappo.weights.layouts import TrainerLayout
from megappo.weights.name_map import MappedParameter, Transform
from megappo.weights.plan import Piece, PlannedBucket, PlannedTensor, WeightPlan, WeightSource, plan_weights
from megappo.weights.transforms import split


@dataclass(kw_only=True, slots=True, frozen=True)
class ExportPlan:
    """What this rank has to do with the export of the weights."""

    source: int
    """Place of the rank's source in the order of all sources; -1: it sends nothing."""
    takes_part: bool
    """Whether this rank feeds a source, its own or another one. The others need not iterate."""
    buckets: list[BucketMeta]
    """What it sends, in order."""

    @property
    def sends(self) -> bool:
        """Whether this rank is a source."""
        return self.source >= 0


@dataclass(kw_only=True, slots=True, frozen=True)
class _Holding:
    """What this rank has of one Hugging Face tensor: a part of a parameter."""

    parameter: torch.nn.Parameter
    mapped: MappedParameter
    part: int
    """Index among the tensors of the parameter."""
    num_groups: int
    """Key/value groups of the rank."""
    queries_per_group: int
    update: LowRankUpdate | None
    """What a layer with an adapter adds to the parameter; the model keeps the two apart."""

    def write(self, target: torch.Tensor) -> None:
        """Write it, in the type of the target, without the padding of a vocabulary."""
        tensor = split(
            self.mapped.transform,
            self.parameter.detach(),
            self.part,
            num_groups=self.num_groups,
            queries_per_group=self.queries_per_group,
        )
        if self.mapped.transform is Transform.vocabulary:
            tensor = tensor[: len(target)]
        target = target.unflatten(0, tensor.shape[:2]) if tensor.dim() > target.dim() else target
        if self.update is None:
            target.copy_(tensor)
        else:
            self.update.write_sum(target, tensor, self.part)


def plan_export(model_chunks: Sequence[MegatronModule], bucket_bytes: int, *, dtype: str | None = None) -> ExportPlan:
    """Return this rank's part in the export; arguments as `iter_export_buckets`."""
    plan = weight_plan(model_chunks, bucket_bytes, dtype=dtype)
    rank = dist.get_rank()
    index = plan.source_of(rank)
    return ExportPlan(
        source=-1 if index is None else index,
        takes_part=any(rank in source.ranks for source in plan.sources),
        buckets=[] if index is None else plan.sources[index].metas,
    )


def weight_plan(model_chunks: Sequence[MegatronModule], bucket_bytes: int, *, dtype: str | None = None) -> WeightPlan:
    """Return the plan that all ranks follow; arguments as `iter_export_buckets`."""
    model = unwrap(model_chunks[0])
    config: Any = model.config  # Any: fields that Megatron declares as possibly absent
    trainer = TrainerLayout(
        world_size=dist.get_world_size(),
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
        embedding_is_layer=config.account_for_embedding_in_pipeline_split,
        head_is_layer=config.account_for_loss_in_pipeline_split,
        virtual_pipeline=config.virtual_pipeline_model_parallel_size,
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
    )
    return plan_weights(
        weights_of(model.architecture, has_value_head=isinstance(model, ValueModel)),
        trainer,
        bucket_bytes=bucket_bytes,
        dtype=dtype or str(next(model.parameters()).dtype).removeprefix("torch."),
    )


class WeightExport:
    """The export of a model's weights, for engines again and again: what stays the same is worked out once.

    All ranks of the model make one with the same arguments. On a CPU a shared buffer stays open in between, which takes
    a bucket of host memory on each machine: to touch its pages anew takes as long as to copy them.
    """

    def __init__(
        self,
        model_chunks: Sequence[MegatronModule],
        bucket_bytes: int,
        *,
        dtype: str | None = None,
        shared: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        """Arguments as `iter_export_buckets`."""
        self._plan = weight_plan(model_chunks, bucket_bytes, dtype=dtype)
        self._held = _holdings(model_chunks)
        self._device = next(model_chunks[0].parameters()).device
        self._shared = shared
        self._timeout_s = timeout_s
        self._kept: dict[int, torch.Tensor] = {}
        """Shared buffers of senders, by rank."""

    @torch.no_grad()
    def buckets(self) -> Iterator[tuple[BucketMeta, torch.Tensor]]:
        """Yield the buckets of one export of the weights as they are now, as `iter_export_buckets`."""
        rank = dist.get_rank()
        for source in self._plan.sources:
            if source.sender == rank:
                gather = self._gather_shared(source) if self._shared else _gather(source, self._held, self._device)
                yield from gather
            elif rank in source.ranks:
                if self._shared:
                    self._feed_shared(source, rank)
                else:
                    _feed(source, rank, self._held, self._device)

    def _gather_shared(self, source: WeightSource) -> Iterator[tuple[BucketMeta, torch.Tensor]]:
        """Put the buckets together in memory that the other ranks write."""
        buffer = self._kept.get(source.sender)
        if buffer is None:
            buffer = self._keep(source, new_buffer(source.bucket_buffer, self._device))
        owner = BufferOwner(buffer, timeout_s=self._timeout_s)
        try:
            for bucket in source.buckets:
                others = [rank for rank in bucket.ranks if rank != source.sender and bucket.bytes_of(rank)]
                owner.invite(others, partial(_exchange_all, dist.isend, bucket=bucket))
                flat = buffer[: bucket.meta.num_bytes]
                _write_pieces(open_bucket(bucket.meta, flat), bucket, source.sender, self._held)
                owner.wait(others)
                yield bucket.meta, flat
        finally:
            owner.close()

    def _feed_shared(self, source: WeightSource, rank: int) -> None:
        """Write this rank's pieces of each bucket where the sender wants them."""
        guest = BufferGuest(self._device, rank=rank, timeout_s=self._timeout_s)
        try:
            for bucket in source.buckets:
                if bucket.bytes_of(rank):
                    receive = partial(_exchange_all, dist.irecv, bucket=bucket)
                    buffer = guest.wait(lambda message, receive=receive: receive({source.sender: message}))
                    self._keep(source, buffer)
                    _write_pieces(open_bucket(bucket.meta, buffer[: bucket.meta.num_bytes]), bucket, rank, self._held)
                    guest.done()
        finally:
            guest.close()

    def _keep(self, source: WeightSource, buffer: torch.Tensor) -> torch.Tensor:
        """Keep a buffer open, where memory of the device is not what it takes. torch opens what is open only once."""
        if self._device.type == "cpu":
            self._kept[source.sender] = buffer
        return buffer


def iter_export_buckets(
    model_chunks: Sequence[MegatronModule], bucket_bytes: int, *, dtype: str | None = None, shared: bool = False
) -> Iterator[tuple[BucketMeta, torch.Tensor]]:
    """Yield the buckets that this rank sends with their bytes, [num_bytes] uint8 on the model's device, which are valid
    until the next one is taken. In between, feed those of other ranks: all ranks that take part must iterate to the
    end. Extra memory as in `WeightPlan`: the largest bucket, and the other ranks' share of it.

    Args:
        bucket_bytes: most bytes of a bucket of several tensors.
        dtype: `float32` or `bfloat16`, in which the tensors travel; None: that of the model.
        shared: gather by writing into memory of the sender, of which `share_bucket` then makes no copy; all ranks that
            feed a source are on one machine.

    Raises:
        WorkerError: `shared`, and another rank has left or is late.
    """
    return WeightExport(model_chunks, bucket_bytes, dtype=dtype, shared=shared).buckets()


def export_hf_state(model_chunks: Sequence[MegatronModule]) -> dict[str, torch.Tensor]:
    """Return all Hugging Face tensors that this rank sends (for small models: they are all in memory at once)."""
    state: dict[str, torch.Tensor] = {}
    for bucket, flat in iter_export_buckets(model_chunks, bucket_bytes=256 * 1024**2):
        state.update(open_bucket(bucket, flat.clone()))
    return state


def _holdings(model_chunks: Sequence[MegatronModule]) -> dict[str, _Holding]:
    """Return what this rank holds, by Hugging Face name."""
    held: dict[str, _Holding] = {}
    for chunk in model_chunks:
        architecture, updates = unwrap(chunk).architecture, updates_of(chunk)
        groups = architecture.num_key_value_heads
        for parameter, mapped in mapped_parameters(chunk):
            for part, name in enumerate(mapped.hugging_face):
                # A tied output layer has the embedding's name and, on the first stage, is the embedding.
                held[name] = _Holding(
                    parameter=parameter,
                    mapped=mapped,
                    part=part,
                    num_groups=groups // shards_of(mapped).size,
                    queries_per_group=architecture.num_attention_heads // groups,
                    update=updates.get(parameter),
                )
    return held


def _gather(
    source: WeightSource, held: dict[str, _Holding], device: torch.device
) -> Iterator[tuple[BucketMeta, torch.Tensor]]:
    """Put the buckets together, one after the other in the same memory."""
    buffer = torch.empty(source.bucket_buffer, dtype=torch.uint8, device=device)
    received = torch.empty(source.receive_buffer, dtype=torch.uint8, device=device)
    for bucket in source.buckets:
        flat = buffer[: bucket.meta.num_bytes]
        tensors = open_bucket(bucket.meta, flat)
        parts: dict[int, torch.Tensor] = {}
        start = 0
        for rank in bucket.ranks:
            if rank != source.sender and (num_bytes := bucket.bytes_of(rank)):
                parts[rank] = received[start : start + num_bytes]
                start += num_bytes
        requests = _exchange(dist.irecv, parts, bucket)
        _write_pieces(tensors, bucket, source.sender, held)
        for request in requests:
            request.wait()
        for rank, part in parts.items():
            for tensor, piece, shard in _open_part(part, bucket, rank):
                _narrow(tensors[tensor.name], tensor, piece).copy_(shard)
        yield bucket.meta, flat


def _feed(source: WeightSource, rank: int, held: dict[str, _Holding], device: torch.device) -> None:
    """Send this rank's pieces of each bucket to the sender."""
    buffer = torch.empty(source.part_buffers[rank], dtype=torch.uint8, device=device)
    for bucket in source.buckets:
        if num_bytes := bucket.bytes_of(rank):
            part = buffer[:num_bytes]
            for tensor, _, shard in _open_part(part, bucket, rank):
                held[tensor.name].write(shard)
            _exchange_all(dist.isend, {source.sender: part}, bucket=bucket)


def _write_pieces(
    tensors: dict[str, torch.Tensor], bucket: PlannedBucket, rank: int, held: dict[str, _Holding]
) -> None:
    """Write what this rank feeds into the whole tensors of a bucket."""
    for tensor, piece in bucket.pieces_of(rank):
        held[tensor.name].write(_narrow(tensors[tensor.name], tensor, piece))


def _exchange_all(operation: Any, parts: dict[int, torch.Tensor], *, bucket: PlannedBucket) -> None:
    """Send or receive and wait for it; arguments as `_exchange`."""
    for request in _exchange(operation, parts, bucket):
        request.wait()


def _exchange(operation: Any, parts: dict[int, torch.Tensor], bucket: PlannedBucket) -> list[dist.Work]:
    """Start sends or receives of bytes to or from other ranks, all at once. `operation` is dist.isend or dist.irecv."""
    group: Any = (  # Any: Megatron's groups may be numbers
        parallel_state.get_expert_tensor_parallel_group()
        if bucket.is_of_experts
        else parallel_state.get_tensor_model_parallel_group()
    )
    if not parts:
        return []
    # As bytes: gloo does not know every dtype.
    return dist.batch_isend_irecv([dist.P2POp(operation, part, rank, group) for rank, part in parts.items()])


def _open_part(
    part: torch.Tensor, bucket: PlannedBucket, rank: int
) -> Iterator[tuple[PlannedTensor, Piece, torch.Tensor]]:
    """Yield the pieces that a rank feeds, one after the other in its bytes, each as a view of them."""
    elements = part.view(torch_dtype(bucket.meta.dtype))
    start = 0
    for tensor, piece in bucket.pieces_of(rank):
        shape = tensor.shape_of(piece)
        stop = start + math.prod(shape)
        yield tensor, piece, elements[start:stop].view(shape)
        start = stop


def _narrow(whole: torch.Tensor, tensor: PlannedTensor, piece: Piece) -> torch.Tensor:
    """Return the place of a piece in the whole tensor."""
    dim = tensor.partition.value
    return whole if dim is None else whole.narrow(dim, piece.start, piece.stop - piece.start)
