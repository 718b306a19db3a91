"""The parameters of a Megatron model: of the whole, and of one chunk on one rank of a layout, in Megatron's order.

All ranks of a pipeline stage hold as many elements: tensor parallelism cuts evenly (a vocabulary is padded for it), and
experts are spread evenly. So a stage stands for its ranks.

Names and order are those of the local layers. Transformer Engine keeps the norms inside the matrices, which are then in
another order; that can move padding between buckets of a distributed optimizer, and nothing else.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megappo.config.lora import LoraConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import place_of_layers

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"

_ORDER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
)
"""How the parameters of a layer follow each other."""
_LAYER = re.compile(r"^decoder\.layers\.\d+\.")


@dataclass(kw_only=True, slots=True, frozen=True)
class WholeTensor:
    """A Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """What adapters call it: q_proj of `...q_proj.weight`; empty for a bias."""
        *_, module, kind = self.name.split(".")
        return module if kind == "weight" else ""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelParameter:
    """One Megatron parameter of the whole model."""

    name: str
    """Of the local layers, with global indices."""
    tensors: tuple[WholeTensor, ...]
    """What it is made of."""
    cut: int | None
    """Dimension along which tensor parallelism cuts each of them; None: every rank has all of it."""
    layer: int | None
    """None: it is of no layer."""
    expert: int | None
    """Global index; None: it is of no expert."""
    is_padded: bool = False
    """A vocabulary: where the cut is not even, rows are added."""

    def shapes(self, shards: int) -> list[list[int]]:
        """Return the shape of one rank's part of each tensor."""
        parts = [list(tensor.shape) for tensor in self.tensors]
        for part in parts if self.cut is not None else []:
            part[self.cut or 0] = -(-part[self.cut or 0] // shards) if self.is_padded else part[self.cut or 0] // shards
        return parts

    def order(self) -> tuple[int, int, int, int, str]:
        """Return what sorts the parameters of a model as Megatron has them."""
        if self.layer is None:
            # A head comes last, whatever it is called.
            return {EMBEDDING: 0, FINAL_NORM: 2}.get(self.name, 3), 0, 0, 0, self.name
        place = _LAYER.sub("", self.name)
        kind = next(index for index, start in enumerate(_ORDER) if place.startswith(start))
        return 1, self.layer, kind, -1 if self.expert is None else self.expert, place


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedModel:
    """All parameters of a model."""

    parameters: tuple[ModelParameter, ...]
    """In Megatron's order. A tied output layer is none."""
    num_layers: int
    num_experts: int = 0
    """Experts of a sparse layer; 0: all layers are dense."""
    tied_embeddings: bool = False
    """Whether the output layer is the token embedding."""
    has_value_head: bool = False

    @property
    def num_elements(self) -> int:
        """Parameters of the whole model, without padding."""
        return sum(prod(tensor.shape) for parameter in self.parameters for tensor in parameter.tensors)


@dataclass(kw_only=True, slots=True, frozen=True)
class LocalParameter:
    """One parameter on one rank."""

    elements: int
    is_of_expert: bool = False
    is_trained: bool = True
    has_own_bucket: bool = False
    """A tied embedding on the first and on the last stage: a distributed optimizer cuts both copies alike."""


def chunk_parameters(
    model: PlannedModel, layout: ParallelismConfig, *, stage: int, lora: LoraConfig | None = None
) -> list[list[LocalParameter]]:
    """Return the parameters of each chunk of a rank of a pipeline stage, in Megatron's order; adapters included."""
    chunks: list[list[LocalParameter]] = []
    for chunk in range(layout.virtual_pipeline or 1):
        held = _held(model, layout, stage, chunk)
        chunks.append([local for parameter in held for local in _local(parameter, model, layout, lora)])
    return chunks


def _held(model: PlannedModel, layout: ParallelismConfig, stage: int, chunk: int) -> list[ModelParameter]:
    """Return the parameters of which a rank of the stage has a part in this chunk."""
    places = place_of_layers(layout, model.num_layers)
    is_first = (stage, chunk) == (0, 0)
    is_last = (stage, chunk) == (layout.pipeline - 1, (layout.virtual_pipeline or 1) - 1)
    experts = model.num_experts // layout.expert
    found: list[ModelParameter] = []
    for parameter in model.parameters:
        if parameter.layer is not None:
            is_here = places[parameter.layer] == (stage, chunk) and (parameter.expert or 0) < max(experts, 1)
        else:
            is_here = is_first if parameter.name == EMBEDDING else is_last
        if is_here:
            found.append(parameter)
    if model.tied_embeddings and is_last and not is_first:
        found += [parameter for parameter in model.parameters if parameter.name == EMBEDDING]
    return found


def _local(
    parameter: ModelParameter, model: PlannedModel, layout: ParallelismConfig, lora: LoraConfig | None
) -> list[LocalParameter]:
    """Return a parameter's part on a rank, and the factors of adapters beside it."""
    shards = layout.tensor if parameter.expert is None else layout.expert_tensor
    shapes = parameter.shapes(shards)
    is_head = model.has_value_head and parameter.layer is None and parameter.name not in (EMBEDDING, FINAL_NORM)
    own = LocalParameter(
        elements=sum(prod(shape) for shape in shapes),
        is_of_expert=parameter.expert is not None,
        is_trained=lora is None or is_head,
        has_own_bucket=model.tied_embeddings and layout.pipeline > 1 and parameter.name == EMBEDDING,
    )
    if lora is None:
        return [own]
    return [own, *_factors(parameter, shapes, lora)]


def _factors(parameter: ModelParameter, shapes: Sequence[Sequence[int]], lora: LoraConfig) -> list[LocalParameter]:
    """Return A [rank, inputs] and B [outputs, rank] of each adapted matrix; either is cut where the matrix is."""
    return [
        LocalParameter(elements=elements)
        for tensor, shape in zip(parameter.tensors, shapes)
        if tensor.module in lora.targets
        for elements in (lora.rank * shape[1], shape[0] * lora.rank)
    ]
