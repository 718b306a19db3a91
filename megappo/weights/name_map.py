"""One name table per model family: it drives loading, export and the hand-over to engines.

A rule names one Megatron parameter (global layer index) and the Hugging Face tensors it is made of. A parameter
without a rule and a rule without its tensors are errors, never skipped. To add a family: a `NameTable` here, from the
rules of the ones that exist, then its registration in `megappo.models.families`. Torch-free.
"""

import re
from dataclasses import dataclass
from enum import Enum

from megappo.errors import CheckpointError


class Transform(Enum):
    """How the Hugging Face tensors of one Megatron parameter are joined."""

    plain = "plain"
    """One tensor, as it is."""
    qkv = "qkv"
    """Query, key, value: per group its R query heads, its key head, its value head."""
    gate_up = "gate_up"
    """Gate rows, then up rows."""


class Partition(Enum):
    """How tensor parallelism cuts the Hugging Face tensors of a parameter."""

    column = 0
    """Along dim 0: output features (of each tensor apart, so gate and up are cut each)."""
    row = 1
    """Along dim 1: input features."""
    replicated = None
    """Every rank holds all of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NameRule:
    """One Megatron parameter; `{layer}` stands for the global layer index."""

    megatron: tuple[str, ...]
    """Its names: of the local layer spec, then that of the Transformer Engine spec where it differs."""
    hugging_face: tuple[str, ...]
    partition: Partition
    transform: Transform = Transform.plain


@dataclass(kw_only=True, slots=True, frozen=True)
class NameTable:
    """All parameters of a family."""

    rules: tuple[NameRule, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class MappedParameter:
    """What one Megatron parameter is made of."""

    hugging_face: list[str]
    partition: Partition
    transform: Transform


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
VALUE_HEAD = "score.weight"
"""Hugging Face name of the value head: the classifier of a `...ForSequenceClassification` model with one label."""


def _rule(
    megatron: str | tuple[str, ...], hugging_face: str | tuple[str, ...], partition: Partition, transform: Transform
) -> NameRule:
    return NameRule(
        megatron=(megatron,) if isinstance(megatron, str) else megatron,
        hugging_face=(hugging_face,) if isinstance(hugging_face, str) else hugging_face,
        partition=partition,
        transform=transform,
    )


def _qkv(kind: str) -> NameRule:
    return _rule(
        f"decoder.layers.{{layer}}.self_attention.linear_qkv.{kind}",
        tuple(f"{_ATTENTION}.{name}_proj.{kind}" for name in "qkv"),
        Partition.column,
        Transform.qkv,
    )


def _norm(local: str, fused: str, hugging_face: str) -> NameRule:
    names = (f"decoder.layers.{{layer}}.{local}.weight", f"decoder.layers.{{layer}}.{fused}.layer_norm_weight")
    return _rule(names, f"model.layers.{{layer}}.{hugging_face}.weight", Partition.replicated, Transform.plain)


def _head_norm(name: str) -> NameRule:
    megatron = f"decoder.layers.{{layer}}.self_attention.{name}_layernorm.weight"
    return _rule(megatron, f"{_ATTENTION}.{name}_norm.weight", Partition.replicated, Transform.plain)


_DENSE = (
    _rule("embedding.word_embeddings.weight", EMBEDDING, Partition.column, Transform.plain),
    _norm("input_layernorm", "self_attention.linear_qkv", "input_layernorm"),
    _qkv("weight"),
    _rule(
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        f"{_ATTENTION}.o_proj.weight",
        Partition.row,
        Transform.plain,
    ),
    _norm("pre_mlp_layernorm", "mlp.linear_fc1", "post_attention_layernorm"),
    _rule(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
        Partition.column,
        Transform.gate_up,
    ),
    _rule("decoder.layers.{layer}.mlp.linear_fc2.weight", f"{_MLP}.down_proj.weight", Partition.row, Transform.plain),
    _rule("decoder.final_layernorm.weight", "model.norm.weight", Partition.replicated, Transform.plain),
    _rule("output_layer.weight", OUTPUT, Partition.column, Transform.plain),
    _rule("value_head.weight", VALUE_HEAD, Partition.replicated, Transform.plain),
)

LLAMA = NameTable(rules=_DENSE)
QWEN2 = NameTable(rules=(*_DENSE, _qkv("bias")))
QWEN3 = NameTable(rules=(*_DENSE, _head_norm("q"), _head_norm("k")))


def map_parameter(table: NameTable, megatron_name: str) -> MappedParameter:
    """Return what a Megatron parameter, named with its global layer index, is made of.

    Raises:
        CheckpointError: the table has no rule for the name.
    """
    layer = _LAYER.match(megatron_name)
    pattern = _LAYER.sub("decoder.layers.{layer}.", megatron_name)
    for rule in table.rules:
        if pattern in rule.megatron:
            index = layer.group(1) if layer else ""
            names = [name.replace("{layer}", index) for name in rule.hugging_face]
            return MappedParameter(hugging_face=names, partition=rule.partition, transform=rule.transform)
    raise CheckpointError(
        f"parameter {megatron_name} has no rule in the name table of its family "
        "(add one to megappo/weights/name_map.py)"
    )


def global_name(local_name: str, layer_offset: int) -> str:
    """Return a parameter's name with its global layer index; `layer_offset` is the first layer of its model chunk."""
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match.group(1)) + layer_offset}.", local_name)


def hugging_face_names(table: NameTable, num_layers: int) -> set[str]:
    """Return all Hugging Face names of a model of this family, both heads included."""
    names: set[str] = set()
    for rule in table.rules:
        for name in rule.hugging_face:
            names.update(name.replace("{layer}", str(layer)) for layer in range(num_layers))
    return names
