"""The sizes of a model that its layout over devices depends on, read without loading a model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.expert_rules import ExpertShape
from megappo.config.model import RandomModelConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """Sizes of one Hugging Face model."""

    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    max_position_embeddings: int | None
    """Longest sequence in tokens; None: the model names none."""
    ffn_hidden_size: int | None = None
    """Size of a dense layer's feed-forward network; None: there is no dense layer."""
    experts: ExpertShape | None = None
    """None: all layers are dense."""


def random_model_shape(model: RandomModelConfig) -> ModelShape:
    """Return the sizes of the model that `megappo sft` makes."""
    return ModelShape(
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        num_hidden_layers=model.num_layers,
        max_position_embeddings=model.max_position_embeddings,
        ffn_hidden_size=model.ffn_hidden_size,
    )


def folder_shape(folder: Path) -> ModelShape:
    """Return the sizes in `<folder>/config.json`; a text model nested under `text_config` is looked into.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or a size is missing.
    """
    # Any: the file may hold whatever its writer liked.
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes: dict[str, Any] = content.get("text_config") or content
    missing = [name for name in ("num_attention_heads", "num_hidden_layers") if not isinstance(sizes.get(name), int)]
    if missing:
        raise ValueError(f"config.json names no {' and no '.join(missing)}")
    heads: int = sizes["num_attention_heads"]
    experts = _expert_shape(sizes)
    has_dense_layers = experts is None or sizes.get("mlp_only_layers") or (sizes.get("decoder_sparse_step") or 1) > 1
    return ModelShape(
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads") or heads,
        num_hidden_layers=sizes["num_hidden_layers"],
        max_position_embeddings=sizes.get("max_position_embeddings"),
        ffn_hidden_size=sizes.get("intermediate_size") if has_dense_layers else None,
        experts=experts,
    )


def _expert_shape(sizes: dict[str, Any]) -> ExpertShape | None:  # Any: as above
    count = sizes.get("num_local_experts", sizes.get("num_experts"))  # transformers 5 and 4 differ
    ffn = sizes.get("moe_intermediate_size", sizes.get("intermediate_size"))
    return ExpertShape(num_experts=count, ffn_hidden_size=ffn) if count and ffn else None
