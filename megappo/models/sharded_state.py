"""What a checkpoint calls the weights of a model, and which part of each this rank has: the same for every layout.

Every key is one global tensor without padding, whatever cut it (tensor, pipeline, virtual stages, experts, context,
data), and whichever layers (local or Transformer Engine's) it was trained with:

- the parameter's Megatron name of the local layers with its global layer and expert index, such as
  `decoder.layers.3.self_attention.linear_qkv.weight`. Fused gate and up are two keys, ending in `_w` and `_v`, as
  Megatron's `singleton_local_shards` has them (transformer/mlp.py:301);
- `embedding.word_embeddings.weight` and `output_layer.weight` have a row per token of the vocabulary. A tied output
  layer has no key: it is the embedding;
- adapters have the names that PEFT gives them. Weights that are frozen beside adapters have no key.

Invariants (asserted by tests/models/test_sharded_state.py):
1. Keys and global shapes are the same in every layout.
2. The parts of the main replicas cover every global tensor once.
3. A model without memory for its weights (`build_model(..., on_meta=True)`) has the same parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule

from megappo.models.architecture import ModelArchitecture
from megappo.models.lora import adapter_parameters
from megappo.models.parameters import Shards, mapped_parameters, shards_of, unwrap
from megappo.weights.name_map import EMBEDDING, MappedParameter, Transform

_WHOLE = Shards(rank=0, size=1)


@dataclass(kw_only=True, slots=True, frozen=True)
class Copies:
    """Which ranks hold the same part of a tensor, and which of these this rank is."""

    tensor: Shards
    """Among tensor-parallel ranks."""
    data: Shards
    """Among data- and context-parallel ranks (of experts: among those that hold the same experts)."""
    of_other_stage: bool
    """The part is of another stage, which stores it: a tied embedding on the last stage."""

    def is_main(self, key: str, *, data_is_cut: bool) -> bool:
        """Whether this rank is the one that stores its copy. Tensors are spread over the ranks by their keys.

        Args:
            data_is_cut: each data-parallel rank holds something else: state of a distributed optimizer.
        """
        spread = crc32(key.encode())
        chosen = [spread % self.tensor.size == self.tensor.rank]
        if not data_is_cut:
            chosen.append(spread // self.tensor.size % self.data.size == self.data.rank)
        return all(chosen) and not self.of_other_stage


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightPart:
    """Rows of a parameter that are a part of one global tensor."""

    key: str
    parameter: torch.nn.Parameter
    first_row: int
    num_rows: int
    """At least 1."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Where the first of the rows lies in the global tensor."""
    copies: Copies

    @property
    def rows(self) -> torch.Tensor:
        """The rows, as a view of the parameter."""
        return self.parameter.detach().narrow(0, self.first_row, self.num_rows)

    def sharded(self, data: torch.Tensor, *, key: str, offset: Sequence[int], data_is_cut: bool) -> ShardedTensor:
        """Return a piece of a tensor that is cut as the weight is: the weight itself or state of its optimizer.

        Args:
            key: of the global tensor.
            offset: of the piece in the global tensor.
            data_is_cut: as in `Copies.is_main`.
        """
        return ShardedTensor(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            self.global_shape,
            tuple(offset),
            # No regular grid: the last part of a vocabulary is smaller, and an optimizer is cut anywhere.
            axis_fragmentations=None,
            replica_id=0 if self.copies.is_main(self.key, data_is_cut=data_is_cut) else 1,
        )


def sharded_weights(chunks: Sequence[MegatronModule]) -> ShardedStateDict:
    """Return this rank's parts of all weights that a checkpoint holds, by key; the tensors are views of the weights.

    What `megatron.core.dist_checkpointing` saves, and what it fills when it loads.
    """
    return {
        part.key: part.sharded(part.rows, key=part.key, offset=part.global_offset, data_is_cut=False)
        for part in weight_parts(chunks)
    }


def weight_parts(chunks: Sequence[MegatronModule]) -> list[WeightPart]:
    """Return this rank's parts of all weights that a checkpoint holds, in a fixed order.

    Args:
        chunks: bare, or wrapped for data parallelism; on any device, without memory (meta) too.
    """
    parts: list[WeightPart] = []
    for chunk in chunks:
        for parameter, mapped in mapped_parameters(chunk):
            if parameter.requires_grad:
                parts += _parts_of(parameter, mapped, unwrap(chunk).architecture)
        for parameter, name in adapter_parameters(chunk):
            parts += _cut(parameter, _adapter_dim(parameter), name, shards=_tensor_ranks(), copies=_data_ranks())
    return parts


def frozen_parts(chunks: Sequence[MegatronModule]) -> list[WeightPart]:
    """Return this rank's parts of the weights that are frozen beside adapters, which a checkpoint does not hold."""
    return [
        part
        for chunk in chunks
        for parameter, mapped in mapped_parameters(chunk)
        if not parameter.requires_grad
        for part in _parts_of(parameter, mapped, unwrap(chunk).architecture)
    ]


def _parts_of(
    parameter: torch.nn.Parameter, mapped: MappedParameter, architecture: ModelArchitecture
) -> Iterator[WeightPart]:
    """Yield the parts of one parameter of the model."""
    shards, copies = shards_of(mapped), _data_ranks() if mapped.expert is None else _expert_data_ranks()
    key, dim = mapped.canonical, mapped.partition.value
    if mapped.transform is Transform.vocabulary:
        start = shards.rank * len(parameter)
        yield from _vocabulary_part(parameter, mapped, start, architecture.vocab_size, copies)
    elif mapped.transform is Transform.gate_up:
        half = len(parameter) // 2
        yield from _cut(parameter, dim, f"{key}_w", shards=shards, copies=copies, rows=range(half))
        yield from _cut(parameter, dim, f"{key}_v", shards=shards, copies=copies, rows=range(half, 2 * half))
    else:
        yield from _cut(parameter, dim, key, shards=shards, copies=copies)


def _vocabulary_part(
    parameter: torch.nn.Parameter, mapped: MappedParameter, start: int, vocab_size: int, data: Shards
) -> Iterator[WeightPart]:
    """Yield the rows of tokens, which begin with token `start`: those of padding belong to the layout."""
    num_rows = min(len(parameter), vocab_size - start)
    is_tied_output = mapped.hugging_face == [EMBEDDING] and mapped.canonical == "output_layer.weight"
    if num_rows > 0:
        yield WeightPart(
            key="embedding.word_embeddings.weight" if is_tied_output else mapped.canonical,
            parameter=parameter,
            first_row=0,
            num_rows=num_rows,
            global_shape=(vocab_size, *parameter.shape[1:]),
            global_offset=(start, *[0] * (parameter.dim() - 1)),
            copies=Copies(tensor=_WHOLE, data=data, of_other_stage=is_tied_output),
        )


def _cut(
    parameter: torch.nn.Parameter,
    dim: int | None,
    key: str,
    *,
    shards: Shards,
    copies: Shards,
    rows: range | None = None,
) -> Iterator[WeightPart]:
    """Yield the part that some rows (default: all) are of a tensor cut evenly along `dim` (None: not cut)."""
    rows = rows or range(len(parameter))
    shape = [len(rows), *parameter.shape[1:]]
    offset = [0] * len(shape)
    if dim is not None:
        offset[dim] = shape[dim] * shards.rank
        shape[dim] *= shards.size
    yield WeightPart(
        key=key,
        parameter=parameter,
        first_row=rows.start,
        num_rows=len(rows),
        global_shape=tuple(shape),
        global_offset=tuple(offset),
        copies=Copies(tensor=shards if dim is None else _WHOLE, data=copies, of_other_stage=False),
    )


def _adapter_dim(parameter: torch.nn.Parameter) -> int | None:
    """Return along which dimension a factor of an adapter is cut (`LowRankUpdate` marks it); None: it is whole."""
    return getattr(parameter, "partition_dim", None) if getattr(parameter, "tensor_model_parallel", False) else None


def _tensor_ranks() -> Shards:
    return Shards(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def _data_ranks() -> Shards:
    return Shards(
        rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        size=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def _expert_data_ranks() -> Shards:
    return Shards(
        rank=parallel_state.get_expert_data_parallel_rank(),
        size=parallel_state.get_expert_data_parallel_world_size(),
    )
