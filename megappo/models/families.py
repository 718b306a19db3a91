"""Model families: which Hugging Face `model_type` is built how. Torch-free.

To add one: write its name table in `megappo.weights.name_map`, then register it here under its `model_type`;
tests/models runs every registered family through load, forward and export.
"""

from dataclasses import dataclass

from megappo.registry import Registry
from megappo.weights.name_map import LLAMA, QWEN2, QWEN3, NameTable


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """What tells one family from another."""

    names: NameTable
    """Its Hugging Face and Megatron parameter names."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""


FAMILIES: Registry[Family] = Registry("model family")
FAMILIES.register("llama", Family(names=LLAMA))
FAMILIES.register("qwen2", Family(names=QWEN2, qkv_bias=True))
FAMILIES.register("qwen3", Family(names=QWEN3, qk_norm=True))
