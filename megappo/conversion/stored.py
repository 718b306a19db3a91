"""What a checkpoint holds of a model, and of which Hugging Face tensors each is made: from config.json alone.

Names, shapes and order of rows are those of `megappo.models.sharded_state`, which names the parts of a model that runs
(asserted by tests/conversion/test_stored.py, family by family).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.config.lora import LoraConfig
from megappo.weights.layouts import ModelWeights
from megappo.weights.name_map import Partition, RuleUse, Transform
from megappo.weights.plan import exported_parameters
from megappo.weights.transforms import merge, split

_GATE_UP = ("_w", "_v")
"""What follows the name of a matrix of gate and up, which a checkpoint holds apart."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    key: str
    """Its name there."""
    hugging_face: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of each Hugging Face tensor."""
    partition: Partition
    """How tensor parallelism cuts it; for experts: the ranks that share one expert."""
    transform: Transform
    layer: int | None
    """Global index; None: it is of no layer."""
    expert: int | None
    """Global index; None: it is of no expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor: the rows of all Hugging Face tensors."""
        first = self.shapes[0]
        return sum(shape[0] for shape in self.shapes), *first[1:]

    def merge(self, parts: Sequence[torch.Tensor], model: ModelWeights, *, size: int = 1) -> torch.Tensor:
        """Return the tensor, or one of `size` shards of it, made of its Hugging Face tensors (or their shards)."""
        return merge(self.transform, parts, num_groups=model.num_key_value_heads // size)

    def split(self, data: torch.Tensor, model: ModelWeights) -> list[torch.Tensor]:
        """Return the Hugging Face tensors of the whole tensor."""
        groups = model.num_key_value_heads
        queries = model.num_attention_heads // groups
        return [
            split(self.transform, data, index, num_groups=groups, queries_per_group=queries).reshape(shape)
            for index, shape in enumerate(self.shapes)
        ]


def stored_tensors(model: ModelWeights) -> list[StoredTensor]:
    """Return all tensors of a model, in the order of its layers."""
    lengths = model.lengths()
    tensors: list[StoredTensor] = []
    for use in exported_parameters(model):
        shapes = tuple(tuple(lengths[size] for size in sizes) for sizes in use.rule.shapes)
        if use.rule.transform is Transform.gate_up:
            for suffix, name, shape in zip(_GATE_UP, use.hugging_face, shapes, strict=True):
                tensors.append(_stored(use, use.canonical + suffix, (name,), (shape,), Transform.plain))
        else:
            tensors.append(_stored(use, use.canonical, tuple(use.hugging_face), shapes, use.rule.transform))
    return tensors


def _stored(
    use: RuleUse, key: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], transform: Transform
) -> StoredTensor:
    return StoredTensor(
        key=key,
        hugging_face=names,
        shapes=shapes,
        partition=use.rule.partition,
        transform=transform,
        layer=use.layer,
        expert=use.expert,
    )


def stored_adapters(model: ModelWeights, lora: LoraConfig) -> list[StoredTensor]:
    """Return the factors of the adapters, A [r, I] and B [O, r] of each matrix, under the names that PEFT gives them.

    A rank of a column-parallel layer has its rows of B and all of A, one of a row-parallel layer its columns of A.
    """
    lengths = model.lengths()
    factors: list[StoredTensor] = []
    for use in exported_parameters(model):
        for name, sizes in zip(use.hugging_face, use.rule.shapes):
            module, _, kind = name.rpartition(".")
            if kind != "weight" or module.rpartition(".")[2] not in lora.targets:
                continue
            rows, features = (lengths[size] for size in sizes)
            cut_by = {"A": Partition.row, "B": Partition.column}
            for factor, shape in (("A", (lora.rank, features)), ("B", (rows, lora.rank))):
                is_cut = use.rule.partition is cut_by[factor]
                factors.append(
                    StoredTensor(
                        key=f"{module}.lora_{factor}.weight",
                        hugging_face=(f"{module}.lora_{factor}.weight",),
                        shapes=(shape,),
                        partition=use.rule.partition if is_cut else Partition.replicated,
                        transform=Transform.plain,
                        layer=use.layer,
                        expert=use.expert,
                    )
                )
    return factors
