"""How a layout of ranks cuts the tensors of a checkpoint.

A checkpoint loads under any layout, however it is cut: a rank reads every part that overlaps with its own, each part
whole. Cut for the layout that will read it, every rank reads its own bytes and no others, from one file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from megappo.config.expert_rules import ExpertShape, expert_violations
from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import divisors
from megappo.conversion.stored import StoredTensor
from megappo.errors import ConfigError, Violation
from megappo.models.architecture import ModelArchitecture
from megappo.weights.layouts import TrainerLayout
from megappo.weights.name_map import EMBEDDING
from megappo.weights.transforms import shard_range

_OPTIONS = {"tensor": "--tp", "pipeline": "--pp", "expert": "--ep", "expert_tensor": "--etp"}
"""Axis of a layout -> option."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredPart:
    """What one rank of the layout holds of a tensor."""

    tensor: StoredTensor
    rank: int
    """Of the layout's ranks, the first that holds it: parts are stored in a file of it."""
    shard: int
    size: int
    """It is shard `shard` of `size`."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def make_layout(*, tensor: int, pipeline: int, expert: int, expert_tensor: int) -> ParallelismConfig:
    """Return the layout of the options --tp, --pp, --ep and --etp."""
    # Sequence parallelism cuts no weights, and with experts there is no tensor parallelism without it.
    return ParallelismConfig(
        tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, sequence=tensor > 1
    )


def check_layout(layout: ParallelismConfig, architecture: ModelArchitecture) -> None:
    """Raise ConfigError with all reasons why the model cannot be cut this way."""
    violations = [
        Violation(key=option, value=size, rule="must be a whole number above 0", remedy="use 1 or more")
        for name, option in _OPTIONS.items()
        if (size := getattr(layout, name)) < 1
    ]
    if violations:
        raise ConfigError(violations)
    counts = [
        ("tensor", "attention heads", architecture.num_attention_heads),
        ("tensor", "key/value heads", architecture.num_key_value_heads),
        ("pipeline", "layers", architecture.num_layers),
    ]
    if architecture.has_dense_layers:
        counts.append(("tensor", "feed-forward features", architecture.ffn_hidden_size))
    for name, what, count in counts:
        if count % (size := getattr(layout, name)):
            rule = f"must divide the {count} {what} of the model"
            violations.append(Violation(key=_OPTIONS[name], value=size, rule=rule, remedy=f"use {divisors(count)}"))
    experts = architecture.experts
    shape = experts and ExpertShape(num_experts=experts.num_experts, ffn_hidden_size=experts.ffn_hidden_size)
    for violation in expert_violations(layout, shape, key="layout"):
        violations.append(replace(violation, key=_OPTIONS[violation.key.removeprefix("layout.")]))
    if violations:
        raise ConfigError(violations)


def trainer_layout(layout: ParallelismConfig) -> TrainerLayout:
    """Return the layout over the fewest ranks that it needs."""
    stage = lcm(layout.tensor, layout.expert * layout.expert_tensor)
    return TrainerLayout.of(layout, stage * layout.pipeline)


def cut_tensors(tensors: Sequence[StoredTensor], layout: ParallelismConfig, *, num_layers: int) -> list[StoredPart]:
    """Return the parts of all tensors, in their order."""
    ranks = trainer_layout(layout)
    stages = ranks.stage_of_layers(num_layers)
    parts: list[StoredPart] = []
    num_experts = 1 + max((tensor.expert for tensor in tensors if tensor.expert is not None), default=0)
    for tensor in tensors:
        if tensor.layer is not None:
            stage = stages[tensor.layer]
        else:
            stage = 0 if tensor.hugging_face == (EMBEDDING,) else layout.pipeline - 1
        if tensor.expert is None:
            holders = ranks.tensor_ranks(stage)
        else:
            holders = ranks.expert_ranks(stage, tensor.expert // (num_experts // layout.expert))
        parts += _cut(tensor, holders)
    return parts


def _cut(tensor: StoredTensor, holders: Sequence[int]) -> Iterator[StoredPart]:
    """Yield the parts of one tensor over the ranks that hold its shards."""
    dim, whole = tensor.partition.value, tensor.shape
    if dim is None:
        yield StoredPart(tensor=tensor, rank=holders[0], shard=0, size=1, offset=(0,) * len(whole), shape=whole)
        return
    for shard, rank in enumerate(holders):
        held = shard_range(whole[dim], rank=shard, size=len(holders))
        if len(held):
            offset = tuple(held.start if at == dim else 0 for at in range(len(whole)))
            shape = tuple(len(held) if at == dim else length for at, length in enumerate(whole))
            yield StoredPart(tensor=tensor, rank=rank, shard=shard, size=len(holders), offset=offset, shape=shape)
