"""The sizes of a model that its layout over devices depends on, read without loading a model."""

import json
from dataclasses import dataclass
from pathlib import Path

from megappo.config.expert_rules import ExpertShape
from megappo.config.model import RandomModelConfig
from megappo.config.model_families import MODEL_FAMILIES
from megappo.config.model_support import Content, dense_layers, head_dim, key_value_heads, num_experts


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """Sizes of one Hugging Face model."""

    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    hidden_size: int
    head_dim: int
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
        hidden_size=model.hidden_size,
        head_dim=model.hidden_size // max(model.num_attention_heads, 1),
        max_position_embeddings=model.max_position_embeddings,
        ffn_hidden_size=model.ffn_hidden_size,
    )


def read_model_config(folder: Path) -> Content:
    """Return the content of `<folder>/config.json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or no JSON object.
    """
    content: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it must hold a JSON object, holds {type(content).__name__}")
    return content  # pyright: ignore[reportUnknownVariableType]


def shape_of(content: Content) -> ModelShape:
    """Return the sizes in a config.json without faults (`megappo.config.model_support`)."""
    experts, has_dense_layers = _expert_shape(content)
    return ModelShape(
        num_attention_heads=content["num_attention_heads"],
        num_key_value_heads=key_value_heads(content),
        num_hidden_layers=content["num_hidden_layers"],
        hidden_size=content["hidden_size"],
        head_dim=head_dim(content),
        max_position_embeddings=content.get("max_position_embeddings"),
        ffn_hidden_size=content["intermediate_size"] if has_dense_layers else None,
        experts=experts,
    )


def _expert_shape(content: Content) -> tuple[ExpertShape | None, bool]:
    """Return the experts, and whether there are dense layers."""
    keys, count = MODEL_FAMILIES[content["model_type"]].experts, num_experts(content)
    dense = dense_layers(content) if keys and count else range(content["num_hidden_layers"])
    if keys is None or not count or len(dense) == content["num_hidden_layers"]:
        return None, True
    return ExpertShape(num_experts=count, ffn_hidden_size=content[keys.ffn_hidden_size]), bool(dense)
