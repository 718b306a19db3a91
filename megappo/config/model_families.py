"""Model families by `model_type`, as far as config.json and the rules before a run go.

Their parameter names are beside their registration (`megappo.models.families`), which a test holds to be complete.
"""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class ExpertKeys:
    """How a family's config.json describes its mixture of experts."""

    ffn_hidden_size: str
    """Key of the size of one expert's feed-forward network."""
    normalize_probs: str | None = None
    """Key that says whether the probabilities of a token's experts are scaled to sum to 1; None: they always are."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FamilyTraits:
    """What tells one family from another, apart from names."""

    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    rope_theta: float = 1e4
    """What transformers takes where config.json names none."""
    experts: ExpertKeys | None = None
    """None: all layers are dense."""


MODEL_FAMILIES = {
    "llama": FamilyTraits(),
    "qwen2": FamilyTraits(qkv_bias=True),
    "qwen3": FamilyTraits(qk_norm=True),
    "qwen3_moe": FamilyTraits(
        qk_norm=True,
        experts=ExpertKeys(ffn_hidden_size="moe_intermediate_size", normalize_probs="norm_topk_prob"),
    ),
    "mixtral": FamilyTraits(rope_theta=1e6, experts=ExpertKeys(ffn_hidden_size="intermediate_size")),
}
