"""Megatron weights out, under their Hugging Face names: bucket by bucket for engines, and as a model folder.

Every pipeline stage exports what it holds; a tied output layer on the last stage is the embedding of the first and is
left out. The ranks that hold one copy of the stage take part and all get the same buckets: its tensor-parallel ranks,
and with experts those that hold the other experts or shards of them (expert parallelism reaches over data-parallel
replicas). Other replicas hold the same weights and are not needed (`ExportPlan.takes_part`).

Of a layer with an adapter the sum of weight and update is exported, made tensor by tensor; the model stays as it is.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.models.architecture import ModelArchitecture
from megappo.models.families import FAMILIES
from megappo.models.lora import updates_of
from megappo.models.low_rank import LowRankUpdate
from megappo.models.parameters import hugging_face_shapes, local_experts, mapped_parameters, shards_of, unwrap
from megappo.weights.buckets import BucketMeta, TensorMeta, open_bucket, plan_buckets
from megappo.weights.name_map import EMBEDDING, MappedParameter, Partition, map_parameter, name_of_expert
from megappo.weights.transforms import shard, split


@dataclass(kw_only=True, slots=True, frozen=True)
class ExportPlan:
    """What this rank has to do with the export of the weights."""

    stage: int
    """Pipeline stage."""
    takes_part: bool
    """Whether this rank is of the stage's first copy of all weights. The others need not iterate."""
    sends: bool
    """Whether this rank is the stage's source: the first of its ranks."""
    buckets: list[BucketMeta]
    """The buckets of the stage, in order; the same on all its ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Source:
    """One Hugging Face tensor and the parameter it is a part of."""

    parameter: torch.nn.Parameter
    """Of this rank, also when the tensor is of another rank's expert: then one of the same shape."""
    mapped: MappedParameter
    part: int
    """Index among the tensors of the parameter."""
    holder: int | None
    """Expert-parallel rank that holds the expert; None: the tensor is of no expert."""
    architecture: ModelArchitecture
    update: LowRankUpdate | None
    """What a layer with an adapter adds to the parameter; the model keeps the two apart."""


def plan_export(model_chunks: Sequence[MegatronModule], bucket_bytes: int) -> ExportPlan:
    """Return this rank's part in the export and the buckets of its stage."""
    # Megatron numbers the ranks of a stage tensor first, then context and data; experts' groups are runs of them.
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    place = parallel_state.get_tensor_model_parallel_rank()
    place += tensor * parallel_state.get_data_parallel_rank(with_context_parallel=True)
    experts: Any = parallel_state.get_expert_tensor_and_model_parallel_group()  # Any: Megatron's groups may be numbers
    return ExportPlan(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        takes_part=place < math.lcm(tensor, experts.size()),  # whole groups of both kinds
        sends=place == 0,
        buckets=plan_buckets(weight_manifest(model_chunks), bucket_bytes),
    )


def weight_manifest(model_chunks: Sequence[MegatronModule]) -> list[TensorMeta]:
    """Return the Hugging Face tensors that this stage exports, in the order in which it does."""
    return [meta for meta, _ in _sources(model_chunks)]


@torch.no_grad()
def iter_export_buckets(
    model_chunks: Sequence[MegatronModule], bucket_bytes: int
) -> Iterator[tuple[BucketMeta, torch.Tensor]]:
    """Yield the buckets of `plan_export` with their bytes, [num_bytes] uint8 on the model's device.

    One all-gather of flattened shards per bucket over the tensor-parallel ranks, and one over the ranks that hold its
    experts: all of them must iterate to the end. Extra memory: the bucket, its gathered shards and the own shards, so
    at most 2 + 1 / tensor buckets (or tensors larger than a bucket); 1 without tensor parallelism. Experts' shards are
    padded to those of the rank with most in the bucket: the gathered ones take up to a tensor per rank more.
    """
    tensors = list(_sources(model_chunks))
    sources = {meta.name: source for meta, source in tensors}
    for bucket in plan_buckets([meta for meta, _ in tensors], bucket_bytes):
        yield bucket, _gather_bucket(bucket, [sources[name] for name in bucket.names])


def export_hf_state(model_chunks: Sequence[MegatronModule]) -> dict[str, torch.Tensor]:
    """Return all Hugging Face tensors of this stage (for small models: they are all in memory at once)."""
    state: dict[str, torch.Tensor] = {}
    for bucket, flat in iter_export_buckets(model_chunks, bucket_bytes=256 * 1024**2):
        state.update(open_bucket(bucket, flat))
    return state


def _sources(model_chunks: Sequence[MegatronModule]) -> Iterator[tuple[TensorMeta, _Source]]:
    """Yield the stage's tensors in the order of export, the same on all its ranks: of experts, the first ones of all
    expert-parallel ranks, then the second ones, so that a bucket has about as much from each of them."""
    for chunk in model_chunks:
        model = unwrap(chunk)
        architecture = model.architecture
        updates = updates_of(chunk)
        for parameter, mapped in mapped_parameters(chunk):
            if mapped.hugging_face == [EMBEDDING] and not model.pre_process:
                continue
            shapes = hugging_face_shapes(parameter, mapped, architecture)
            dtype = str(parameter.dtype).removeprefix("torch.")
            for holder, of_holder in _holders(mapped, architecture):
                for part, (name, shape) in enumerate(zip(of_holder.hugging_face, shapes)):
                    yield (
                        TensorMeta(name=name, shape=shape, dtype=dtype),
                        _Source(
                            parameter=parameter,
                            mapped=of_holder,
                            part=part,
                            holder=holder,
                            architecture=architecture,
                            update=updates.get(parameter),
                        ),
                    )


def _holders(mapped: MappedParameter, architecture: ModelArchitecture) -> Iterator[tuple[int | None, MappedParameter]]:
    """Yield what stands in the place of a parameter on every expert-parallel rank, with the rank."""
    if mapped.expert is None:
        yield None, mapped
        return
    table = FAMILIES.get(architecture.family).names
    experts = local_experts(architecture)
    for rank in range(parallel_state.get_expert_model_parallel_world_size()):
        expert = rank * experts + mapped.expert % experts
        yield rank, map_parameter(table, name_of_expert(mapped.megatron, expert))


def _gather_bucket(bucket: BucketMeta, sources: list[_Source]) -> torch.Tensor:
    """Gather the tensors of one bucket into its bytes."""
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=sources[0].parameter.device)
    shards: list[tuple[torch.Tensor, _Source]] = []
    experts: list[tuple[torch.Tensor, _Source]] = []
    for target, source in zip(open_bucket(bucket, flat).values(), sources):
        if source.holder is not None:
            experts.append((target, source))
        elif source.mapped.partition is not Partition.replicated:
            shards.append((target, source))
        else:
            target.copy_(_local_tensor(source))
    _gather(shards, group=parallel_state.get_tensor_model_parallel_group())
    _gather(experts, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    return flat


def _gather(tensors: list[tuple[torch.Tensor, _Source]], *, group: Any) -> None:  # Any: as above
    """Fill tensors of a bucket, in one all-gather, with the shards that the ranks of a group hold."""
    if group.size() == 1:
        for target, source in tensors:
            target.copy_(_local_tensor(source)[: len(target)])
    if group.size() == 1 or not tensors:
        return
    members = [_places(tensors, rank) for rank in range(group.size())]
    counts = [sum(place.numel() for place, _ in places) for places in members]
    padding = tensors[0][0].new_zeros(max(counts) - counts[group.rank()])
    own = torch.cat(
        [*(_local_tensor(source)[: len(place)].flatten() for place, source in members[group.rank()]), padding]
    )
    received = torch.empty(group.size() * own.nbytes, dtype=torch.uint8, device=own.device)
    # As bytes: gloo does not know every dtype.
    dist.all_gather_into_tensor(received, own.view(torch.uint8), group=group)
    for places, values in zip(members, received.view(own.dtype).view(group.size(), -1)):
        start = 0
        for place, _ in places:
            place.copy_(values[start : start + place.numel()].view(place.shape))
            start += place.numel()


def _places(tensors: list[tuple[torch.Tensor, _Source]], member: int) -> list[tuple[torch.Tensor, _Source]]:
    """Return what one rank of a group holds of the tensors, as views of them."""
    places: list[tuple[torch.Tensor, _Source]] = []
    for target, source in tensors:
        size = shards_of(source.mapped).size
        # Megatron numbers the ranks of the experts' group by shard first.
        if source.holder is None or source.holder == member // size:
            places.append((shard(source.mapped.partition, target, rank=member % size, size=size), source))
    return places


def _local_tensor(source: _Source) -> torch.Tensor:
    """Return this rank's shard of the Hugging Face tensor, with the padding of a vocabulary and an adapter's update."""
    groups = source.architecture.num_key_value_heads // parallel_state.get_tensor_model_parallel_world_size()
    queries = source.architecture.num_attention_heads // source.architecture.num_key_value_heads
    parameter = source.parameter.detach()
    tensor = split(source.mapped.transform, parameter, source.part, num_groups=groups, queries_per_group=queries)
    return tensor if source.update is None else source.update.merged(tensor, source.part)
