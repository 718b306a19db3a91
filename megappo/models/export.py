"""Megatron weights out, under their Hugging Face names: bucket by bucket for engines, and as a model folder.

Every pipeline stage exports what it holds; a tied output layer on the last stage is the embedding of the first and is
left out. All tensor-parallel ranks of a stage take part and get the same buckets. Data-parallel replicas hold the same
weights: one of them is enough (`ExportPlan.takes_part`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.models.architecture import ModelArchitecture
from megappo.models.parameters import hugging_face_shapes, mapped_parameters, unwrap
from megappo.weights.buckets import BucketMeta, TensorMeta, open_bucket, plan_buckets, torch_dtype
from megappo.weights.name_map import EMBEDDING, MappedParameter, Partition
from megappo.weights.transforms import shard, split


@dataclass(kw_only=True, slots=True, frozen=True)
class ExportPlan:
    """What this rank has to do with the export of the weights."""

    stage: int
    """Pipeline stage."""
    takes_part: bool
    """Whether this rank's replica exports: data- and context-parallel rank 0. The others need not iterate."""
    sends: bool
    """Whether this rank is the stage's source: takes part, and is tensor-parallel rank 0."""
    buckets: list[BucketMeta]
    """The buckets of the stage, in order; the same on all its ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Source:
    """One Hugging Face tensor and the parameter it is a part of."""

    parameter: torch.nn.Parameter
    mapped: MappedParameter
    part: int
    """Index among the tensors of the parameter."""
    architecture: ModelArchitecture


def plan_export(model_chunks: Sequence[MegatronModule], bucket_bytes: int) -> ExportPlan:
    """Return this rank's part in the export and the buckets of its stage."""
    takes_part = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return ExportPlan(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        takes_part=takes_part,
        sends=takes_part and parallel_state.get_tensor_model_parallel_rank() == 0,
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

    One all-gather of flattened shards per bucket over the tensor-parallel ranks: all of them must iterate to the end.
    Extra memory: the bucket, its gathered shards and the own shards, so at most 2 + 1 / tensor buckets (or tensors
    larger than a bucket); 1 without tensor parallelism.
    """
    sources = {meta.name: source for meta, source in _sources(model_chunks)}
    for bucket in plan_buckets(weight_manifest(model_chunks), bucket_bytes):
        yield bucket, _gather_bucket(bucket, [sources[name] for name in bucket.names])


def export_hf_state(model_chunks: Sequence[MegatronModule]) -> dict[str, torch.Tensor]:
    """Return all Hugging Face tensors of this stage (for small models: they are all in memory at once)."""
    state: dict[str, torch.Tensor] = {}
    for bucket, flat in iter_export_buckets(model_chunks, bucket_bytes=256 * 1024**2):
        state.update(open_bucket(bucket, flat))
    return state


def _sources(model_chunks: Sequence[MegatronModule]) -> Iterator[tuple[TensorMeta, _Source]]:
    for chunk in model_chunks:
        model = unwrap(chunk)
        architecture = model.architecture
        for parameter, mapped in mapped_parameters(chunk):
            if mapped.hugging_face == [EMBEDDING] and not model.pre_process:
                continue
            shapes = hugging_face_shapes(parameter, mapped, architecture)
            dtype = str(parameter.dtype).removeprefix("torch.")
            for part, (name, shape) in enumerate(zip(mapped.hugging_face, shapes)):
                meta = TensorMeta(name=name, shape=shape, dtype=dtype)
                yield meta, _Source(parameter=parameter, mapped=mapped, part=part, architecture=architecture)


def _gather_bucket(bucket: BucketMeta, sources: list[_Source]) -> torch.Tensor:
    """Gather the tensors of one bucket into its bytes."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    device = sources[0].parameter.device
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    targets = list(open_bucket(bucket, flat).values())
    cut = [size > 1 and source.mapped.partition is not Partition.replicated for source in sources]
    for target, source, is_cut in zip(targets, sources, cut):
        if not is_cut:
            target.copy_(_local_tensor(source))
    if any(cut):
        chosen = [(target, source) for target, source, is_cut in zip(targets, sources, cut) if is_cut]
        _gather_shards(chosen, torch_dtype(bucket.dtype), size)
    return flat


def _gather_shards(chosen: list[tuple[torch.Tensor, _Source]], dtype: torch.dtype, size: int) -> None:
    """All-gather the shards of the chosen tensors in one call and put them into their places."""
    own = torch.cat([_local_tensor(source).flatten() for _, source in chosen])
    gathered = torch.empty(size * own.numel() * dtype.itemsize, dtype=torch.uint8, device=own.device)
    # As bytes: gloo does not know every dtype.
    dist.all_gather_into_tensor(gathered, own.view(torch.uint8), group=parallel_state.get_tensor_model_parallel_group())
    for rank, received in enumerate(gathered.view(dtype).view(size, -1)):
        start = 0
        for target, source in chosen:
            place = shard(source.mapped.partition, target, rank=rank, size=size)
            stop = start + math.prod(place.shape)
            place.copy_(received[start:stop].view(place.shape))
            start = stop


def _local_tensor(source: _Source) -> torch.Tensor:
    """Return this rank's shard of the Hugging Face tensor."""
    groups = source.architecture.num_key_value_heads // parallel_state.get_tensor_model_parallel_world_size()
    queries = source.architecture.num_attention_heads // source.architecture.num_key_value_heads
    parameter = source.parameter.detach()
    return split(source.mapped.transform, parameter, source.part, num_groups=groups, queries_per_group=queries)
