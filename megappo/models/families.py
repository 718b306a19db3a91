"""Model families: which Hugging Face `model_type` is built how. Torch-free.

To add one: write its name table in `megappo.weights.name_map` and its traits in `megappo.config.model_families`, then
register both here under its `model_type`; tests/models runs every registered family through load, forward and export.
"""

from dataclasses import dataclass

from megappo.config.model_families import MODEL_FAMILIES, FamilyTraits
from megappo.registry import Registry
from megappo.weights.name_map import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, NameTable


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """A family of models."""

    names: NameTable
    """Its Hugging Face and Megatron parameter names."""
    traits: FamilyTraits
    """What else tells it from another."""


FAMILIES: Registry[Family] = Registry("model family")
FAMILIES.register("llama", Family(names=LLAMA, traits=MODEL_FAMILIES["llama"]))
FAMILIES.register("qwen2", Family(names=QWEN2, traits=MODEL_FAMILIES["qwen2"]))
FAMILIES.register("qwen3", Family(names=QWEN3, traits=MODEL_FAMILIES["qwen3"]))
FAMILIES.register("qwen3_moe", Family(names=QWEN3_MOE, traits=MODEL_FAMILIES["qwen3_moe"]))
FAMILIES.register("mixtral", Family(names=MIXTRAL, traits=MODEL_FAMILIES["mixtral"]))
