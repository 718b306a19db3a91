"""What each rank of an engine holds of a tensor, under the name it has there, and who feeds it: shard to shard.

SGLang 0.5.23 fuses query, key and value of its rank to `qkv_proj`, gate and up to `gate_up_proj`, and the experts of a
layer to `w13_weight` [experts, 2 F / ranks, H] and `w2_weight` [experts, H, F / ranks] (srt/models/qwen3_moe.py:1160,
srt/layers/moe/fused_moe_triton/layer.py). Each Hugging Face tensor is a run of rows of one of them.
"""

import re
from dataclasses import dataclass

from megappo.weights.layouts import EngineLayout, ModelWeights
from megappo.weights.name_map import Size
from megappo.weights.plan import Piece, PlannedTensor, WeightPlan

_FUSED = {
    **{f"{name}_proj": "qkv_proj" for name in "qkv"},
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.weight$")
_SECOND = ("up_proj", "w3")
"""The half of a fused matrix that comes after the other one; w1 and w2 are Mixtral's names of gate and down."""
_DOWN = ("down_proj", "w2")


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineShard:
    """What one rank of an engine holds of one Hugging Face tensor."""

    rank: int
    """In the engine."""
    name: str
    """Of the engine's own parameter."""
    expert: int | None
    """Index in the first dimension of the parameter; None: it is of no expert."""
    offset: int
    """First row in the parameter (of the expert) that the tensor has."""
    start: int
    stop: int
    """Positions of the whole tensor, along the dimension that is cut."""
    num_bytes: int
    feeds: tuple[Piece, ...]
    """The ranks of the trainer, each with positions of the whole tensor, in order; together they are the shard."""


def engine_shards(plan: WeightPlan, tensor: PlannedTensor) -> list[EngineShard]:
    """Return what each rank of an engine holds of a tensor, by rank."""
    shards: list[EngineShard] = []
    for rank in range(plan.engine.tensor):
        held = _held(plan.engine, plan.model, tensor, rank)
        name, expert = engine_name(tensor.name)
        shards.append(
            EngineShard(
                rank=rank,
                name=name,
                expert=expert,
                offset=_offset(plan, tensor, rank),
                start=held.start,
                stop=held.stop,
                num_bytes=tensor.bytes_of(len(held)),
                feeds=tuple(_overlaps(tensor, held)),
            )
        )
    return shards


def engine_name(name: str) -> tuple[str, int | None]:
    """Return the engine's own parameter of a Hugging Face tensor, and which expert of it."""
    if match := _EXPERT.match(name):
        block, expert, matrix = match.groups()
        return f"{block}.{'w2' if matrix in _DOWN else 'w13'}_weight", int(expert)
    *path, module, kind = name.split(".")
    return ".".join([*path, _FUSED.get(module, module), kind]), None


def _held(engine: EngineLayout, model: ModelWeights, tensor: PlannedTensor, rank: int) -> range:
    return engine.part(tensor.cut, tensor.length, rank=rank, num_key_value_heads=model.num_key_value_heads)


def _offset(plan: WeightPlan, tensor: PlannedTensor, rank: int) -> int:
    """Return the rows of the rank's fused parameter that come before those of the tensor."""
    module = tensor.name.split(".")[-2]

    def rows(size: Size) -> int:
        heads = plan.model.num_key_value_heads
        return len(plan.engine.part(size, plan.model.lengths()[size], rank=rank, num_key_value_heads=heads))

    if module in _SECOND and tensor.cut is not None:
        return rows(tensor.cut)
    if module == "k_proj":
        return rows(Size.queries)
    return rows(Size.queries) + rows(Size.keys) if module == "v_proj" else 0


def _overlaps(tensor: PlannedTensor, held: range) -> list[Piece]:
    found: list[Piece] = []
    for piece in tensor.pieces:
        start, stop = max(piece.start, held.start), min(piece.stop, held.stop)
        if start < stop:
            found.append(Piece(rank=piece.rank, start=start, stop=stop))
    return found
