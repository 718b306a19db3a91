"""Model families: which Hugging Face `model_type` is built how. Torch-free.

To add one: write its name table in `megappo.weights.name_map`, then register it here under its `model_type`;
tests/models runs every registered family through load, forward and export.
"""

from dataclasses import dataclass

from megappo.registry import Registry
from megappo.weights.name_map import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, NameTable


@dataclass(kw_only=True, slots=True, frozen=True)
class ExpertKeys:
    """How a family's config.json describes its mixture of experts."""

    ffn_hidden_size: str
    """Key of the size of one expert's feed-forward network."""
    normalize_probs: str | None = None
    """Key that says whether the probabilities of a token's experts are scaled to sum to 1; None: they always are."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """What tells one family from another."""

    names: NameTable
    """Its Hugging Face and Megatron parameter names."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    rope_theta: float = 1e4
    """What transformers takes where config.json names none."""
    experts: ExpertKeys | None = None
    """None: all layers are dense."""


FAMILIES: Registry[Family] = Registry("model family")
FAMILIES.register("llama", Family(names=LLAMA))
FAMILIES.register("qwen2", Family(names=QWEN2, qkv_bias=True))
FAMILIES.register("qwen3", Family(names=QWEN3, qk_norm=True))
FAMILIES.register(
    "qwen3_moe",
    Family(
        names=QWEN3_MOE,
        qk_norm=True,
        experts=ExpertKeys(ffn_hidden_size="moe_intermediate_size", normalize_probs="norm_topk_prob"),
    ),
)
FAMILIES.register(
    "mixtral", Family(names=MIXTRAL, rope_theta=1e6, experts=ExpertKeys(ffn_hidden_size="intermediate_size"))
)
