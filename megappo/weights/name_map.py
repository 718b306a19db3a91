"""One name table per model family: it drives loading, export and the hand-over to engines.

A rule names one Megatron parameter (global layer and expert index) and the Hugging Face tensors it is made of. A
parameter without a rule and a rule without its tensors are errors, never skipped. To add a family: a `NameTable` here,
from the rules of the ones that exist, then its registration in `megappo.models.families`. Torch-free.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
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
    vocabulary = "vocabulary"
    """One tensor with a row per token; rows of padding follow where tensor parallelism does not divide it."""


class Partition(Enum):
    """How tensor parallelism cuts the Hugging Face tensors of a parameter."""

    column = 0
    """Along dim 0: output features (of each tensor apart, so gate and up are cut each)."""
    row = 1
    """Along dim 1: input features."""
    replicated = None
    """Every rank holds all of it."""


class Size(Enum):
    """What the length of a dimension of a Hugging Face tensor is."""

    hidden = "hidden"
    queries = "queries"
    """Features of all query heads."""
    keys = "keys"
    """Features of all key heads; as many as of all value heads."""
    head = "head"
    """Features of one head."""
    ffn = "ffn"
    """Features of a dense layer's feed-forward network."""
    expert_ffn = "expert_ffn"
    experts = "experts"
    vocabulary = "vocabulary"
    one = "one"


class Layers(Enum):
    """Which layers have a parameter."""

    every = "every"
    """All, or the rule is about none."""
    dense = "dense"
    """Those with one feed-forward network."""
    sparse = "sparse"
    """Those with a router and experts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NameRule:
    """One Megatron parameter; `{layer}` and `{expert}` stand for the global indices."""

    megatron: tuple[str, ...]
    """Its names: of the local layer spec, then that of the Transformer Engine spec where it differs."""
    hugging_face: tuple[str, ...]
    shapes: tuple[tuple[Size, ...], ...]
    """Of each Hugging Face tensor."""
    partition: Partition
    """For experts: by the ranks that share one expert."""
    transform: Transform = Transform.plain
    layers: Layers = Layers.every


@dataclass(kw_only=True, slots=True, frozen=True)
class NameTable:
    """All parameters of a family."""

    rules: tuple[NameRule, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class MappedParameter:
    """What one Megatron parameter is made of."""

    megatron: str = field(compare=False)
    """Its name with global indices, of either layer spec."""
    canonical: str
    """The same, of the local layer spec: what checkpoints call it."""
    hugging_face: list[str]
    partition: Partition
    transform: Transform
    expert: int | None
    """Global index of the expert that it belongs to; None: it is shared by all tokens."""


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# Of the local spec, experts.local_experts.3.linear_fc1.weight, and of Transformer Engine, experts.linear_fc1.weight3.
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")
_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
VALUE_HEAD = "score.weight"
"""Hugging Face name of the value head: the classifier of a `...ForSequenceClassification` model with one label."""


def _rule(
    megatron: str | tuple[str, ...],
    hugging_face: Mapping[str, tuple[Size, ...]],
    partition: Partition,
    transform: Transform = Transform.plain,
    layers: Layers = Layers.every,
) -> NameRule:
    """Return a rule; `hugging_face` names each tensor with its shape."""
    return NameRule(
        megatron=(megatron,) if isinstance(megatron, str) else megatron,
        hugging_face=tuple(hugging_face),
        shapes=tuple(hugging_face.values()),
        partition=partition,
        transform=transform,
        layers=layers,
    )


def _qkv(kind: str, *features: Size) -> NameRule:
    """Return the rule of the matrix (of these input features) or the bias (none) that makes queries, keys, values."""
    heads = {"q": Size.queries, "k": Size.keys, "v": Size.keys}
    return _rule(
        f"decoder.layers.{{layer}}.self_attention.linear_qkv.{kind}",
        {f"{_ATTENTION}.{name}_proj.{kind}": (size, *features) for name, size in heads.items()},
        Partition.column,
        Transform.qkv,
    )


def _norm(local: str, fused: str, hugging_face: str) -> NameRule:
    names = (f"decoder.layers.{{layer}}.{local}.weight", f"decoder.layers.{{layer}}.{fused}.layer_norm_weight")
    return _rule(names, {f"model.layers.{{layer}}.{hugging_face}.weight": (Size.hidden,)}, Partition.replicated)


def _head_norm(name: str) -> NameRule:
    megatron = f"decoder.layers.{{layer}}.self_attention.{name}_layernorm.weight"
    return _rule(megatron, {f"{_ATTENTION}.{name}_norm.weight": (Size.head,)}, Partition.replicated)


_VOCABULARY = (Size.vocabulary, Size.hidden)
_SHARED = (
    _rule("embedding.word_embeddings.weight", {EMBEDDING: _VOCABULARY}, Partition.column, Transform.vocabulary),
    _norm("input_layernorm", "self_attention.linear_qkv", "input_layernorm"),
    _qkv("weight", Size.hidden),
    _rule(
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        {f"{_ATTENTION}.o_proj.weight": (Size.hidden, Size.queries)},
        Partition.row,
    ),
    # Transformer Engine fuses it with a dense layer's first matrix only.
    _norm("pre_mlp_layernorm", "mlp.linear_fc1", "post_attention_layernorm"),
    _rule("decoder.final_layernorm.weight", {"model.norm.weight": (Size.hidden,)}, Partition.replicated),
    _rule("output_layer.weight", {OUTPUT: _VOCABULARY}, Partition.column, Transform.vocabulary),
    _rule("value_head.weight", {VALUE_HEAD: (Size.one, Size.hidden)}, Partition.replicated),
)

_DENSE_MLP = (
    _rule(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        dict.fromkeys((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), (Size.ffn, Size.hidden)),
        Partition.column,
        Transform.gate_up,
        Layers.dense,
    ),
    _rule(
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
        {f"{_MLP}.down_proj.weight": (Size.hidden, Size.ffn)},
        Partition.row,
        layers=Layers.dense,
    ),
)


def _experts(block: str, *, gate: str, up: str, down: str) -> tuple[NameRule, ...]:
    """Return the rules of a router and its experts, which Hugging Face keeps in `block` of a layer."""
    megatron = "decoder.layers.{layer}.mlp"
    hugging_face = f"model.layers.{{layer}}.{block}"
    expert = f"{hugging_face}.experts.{{expert}}"

    def names(matrix: str) -> tuple[str, str]:
        experts = f"{megatron}.experts"
        return f"{experts}.local_experts.{{expert}}.{matrix}.weight", f"{experts}.{matrix}.weight{{expert}}"

    return (
        _rule(
            f"{megatron}.router.weight",
            {f"{hugging_face}.gate.weight": (Size.experts, Size.hidden)},
            Partition.replicated,
            layers=Layers.sparse,
        ),
        _rule(
            names("linear_fc1"),
            dict.fromkeys((f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), (Size.expert_ffn, Size.hidden)),
            Partition.column,
            Transform.gate_up,
            Layers.sparse,
        ),
        _rule(
            names("linear_fc2"),
            {f"{expert}.{down}.weight": (Size.hidden, Size.expert_ffn)},
            Partition.row,
            layers=Layers.sparse,
        ),
    )


_HEAD_NORMS = (_head_norm("q"), _head_norm("k"))

LLAMA = NameTable(rules=(*_SHARED, *_DENSE_MLP))
QWEN2 = NameTable(rules=(*_SHARED, *_DENSE_MLP, _qkv("bias")))
QWEN3 = NameTable(rules=(*_SHARED, *_DENSE_MLP, *_HEAD_NORMS))
QWEN3_MOE = NameTable(
    rules=(
        *_SHARED,
        *_DENSE_MLP,
        *_HEAD_NORMS,
        *_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )
)
MIXTRAL = NameTable(rules=(*_SHARED, *_experts("block_sparse_moe", gate="w1", up="w3", down="w2")))


def map_parameter(table: NameTable, megatron_name: str) -> MappedParameter:
    """Return what a Megatron parameter, named with its global layer and expert index, is made of.

    Raises:
        CheckpointError: the table has no rule for the name.
    """
    layer, expert = _LAYER.match(megatron_name), _EXPERT.search(megatron_name)
    pattern = _EXPERT.sub("{expert}", _LAYER.sub("decoder.layers.{layer}.", megatron_name))
    indices = layer.group(1) if layer else "", expert.group() if expert else ""
    for rule in table.rules:
        if pattern in rule.megatron:
            return MappedParameter(
                megatron=megatron_name,
                canonical=_filled(rule.megatron[0], *indices),
                hugging_face=[_filled(name, *indices) for name in rule.hugging_face],
                partition=rule.partition,
                transform=rule.transform,
                expert=int(expert.group()) if expert else None,
            )
    raise CheckpointError(
        f"parameter {megatron_name} has no rule in the name table of its family "
        "(add one to megappo/weights/name_map.py)"
    )


def global_name(local_name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """Return a parameter's name with its global indices.

    Args:
        layer_offset: first layer of the model chunk.
        expert_offset: first expert of the rank.
    """
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match.group(1)) + layer_offset}.", local_name)
    return _EXPERT.sub(lambda match: str(int(match.group()) + expert_offset), name)


def name_of_expert(megatron_name: str, expert: int) -> str:
    """Return the name of the same parameter of another expert (global index)."""
    return _EXPERT.sub(str(expert), megatron_name)


@dataclass(kw_only=True, slots=True, frozen=True)
class RuleUse:
    """One parameter that a rule stands for."""

    rule: NameRule
    layer: int | None
    """Global index; None: the parameter is of no layer."""
    expert: int | None
    """Global index; None: it is of no expert."""
    canonical: str
    """As `MappedParameter.canonical`."""
    hugging_face: list[str]
    """Names of its Hugging Face tensors."""


def expand_rules(
    table: NameTable, num_layers: int, *, num_experts: int = 0, dense_layers: Collection[int] = ()
) -> Iterator[RuleUse]:
    """Yield all parameters of a model of this family, both heads included, rule by rule.

    Args:
        num_experts: experts per sparse layer; 0: all layers are dense, whatever `dense_layers` says.
    """
    every = range(num_layers)
    dense = set(every) if num_experts == 0 else set(dense_layers)
    for rule in table.rules:
        layers = {
            Layers.every: every,
            Layers.dense: sorted(dense),
            Layers.sparse: [layer for layer in every if layer not in dense],
        }[rule.layers]
        for layer in layers if "{layer}" in rule.hugging_face[0] else [None]:
            for expert in range(num_experts) if "{expert}" in rule.hugging_face[0] else [None]:
                texts = ["" if index is None else str(index) for index in (layer, expert)]
                names = [_filled(name, *texts) for name in rule.hugging_face]
                canonical = _filled(rule.megatron[0], *texts)
                yield RuleUse(rule=rule, layer=layer, expert=expert, canonical=canonical, hugging_face=names)


def hugging_face_names(
    table: NameTable, num_layers: int, *, num_experts: int = 0, dense_layers: Collection[int] = ()
) -> set[str]:
    """Return all Hugging Face names of a model of this family, both heads included; arguments as `expand_rules`."""
    uses = expand_rules(table, num_layers, num_experts=num_experts, dense_layers=dense_layers)
    return {name for use in uses for name in use.hugging_face}


def _filled(name: str, layer: str, expert: str) -> str:
    return name.replace("{layer}", layer).replace("{expert}", expert)
