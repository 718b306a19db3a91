"""The parameters of a model chunk with what they are called in Hugging Face."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from megappo.models.architecture import ModelArchitecture
from megappo.models.families import FAMILIES
from megappo.models.gpt import LanguageModel
from megappo.models.low_rank import name_without_adapter
from megappo.models.value_head import ValueHead
from megappo.weights.name_map import EMBEDDING, MappedParameter, Transform, global_name, map_parameter


def mapped_parameters(chunk: MegatronModule) -> Iterator[tuple[torch.nn.Parameter, MappedParameter]]:
    """Yield the parameters of one chunk (bare, or wrapped for data parallelism), without adapters, in a fixed order.

    On the last of several stages a tied output layer is a parameter of its own, made of the embedding.

    Raises:
        CheckpointError: a parameter has no rule in the family's name table.
    """
    model = unwrap(chunk)
    table = FAMILIES.get(model.architecture.family).names
    layers: Any = model.decoder.layers  # Any: Megatron's transformer layers
    offset = layers[0].layer_number - 1 if len(layers) else 0
    first_expert = parallel_state.get_expert_model_parallel_rank() * local_experts(model.architecture)
    for own_name, parameter in model.named_parameters():
        local = name_without_adapter(own_name)
        if local is None:
            continue
        name = global_name(local, offset, first_expert)
        if name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
            name = "value_head.weight"
        mapped = map_parameter(table, name)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            mapped = replace(mapped, hugging_face=[EMBEDDING])
        yield parameter, mapped


def unwrap(chunk: MegatronModule) -> LanguageModel:
    """Return the model inside Megatron's wrappers (data parallelism, 16-bit)."""
    model: Any = chunk  # Any: a wrapper holds what it wraps as `module`
    while not isinstance(model, LanguageModel):
        model = model.module
    return model


@dataclass(kw_only=True, slots=True, frozen=True)
class Shards:
    """Where this rank's part of a parameter lies: part `rank` of `size`."""

    rank: int
    size: int


def shards_of(mapped: MappedParameter) -> Shards:
    """Return how tensor parallelism cuts a parameter: that of the model, or that inside an expert."""
    group: Any  # Megatron's groups may be numbers
    if mapped.expert is None:
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
    return Shards(rank=group.rank(), size=group.size())


def local_experts(architecture: ModelArchitecture) -> int:
    """Return the experts of a layer that one rank holds (whole or a shard of each); 0 in a dense model."""
    if architecture.experts is None:
        return 0
    return architecture.experts.num_experts // parallel_state.get_expert_model_parallel_world_size()


def hugging_face_shapes(
    parameter: torch.nn.Parameter, mapped: MappedParameter, architecture: ModelArchitecture
) -> list[list[int]]:
    """Return the shapes of the whole Hugging Face tensors that a (local) parameter is made of."""
    whole = list(parameter.shape)
    if mapped.transform is Transform.vocabulary:
        return [[architecture.vocab_size, *whole[1:]]]
    if mapped.partition.value is not None:
        whole[mapped.partition.value] *= shards_of(mapped).size
    if mapped.transform is Transform.qkv:
        keys = architecture.num_key_value_heads * architecture.head_dim
        queries = architecture.num_attention_heads * architecture.head_dim
        return [[rows, *whole[1:]] for rows in (queries, keys, keys)]
    if mapped.transform is Transform.gate_up:
        return [[whole[0] // 2, *whole[1:]]] * 2
    return [whole]
