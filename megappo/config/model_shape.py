"""The sizes of a model that its layout over devices depends on, read without loading a model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.model import RandomModelConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """Sizes of one Hugging Face model."""

    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    max_position_embeddings: int | None
    """Longest sequence in tokens; None: the model names none."""


def random_model_shape(model: RandomModelConfig) -> ModelShape:
    """Return the sizes of the model that `megappo sft` makes."""
    return ModelShape(
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        num_hidden_layers=model.num_layers,
        max_position_embeddings=model.max_position_embeddings,
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
    return ModelShape(
        num_attention_heads=heads,
        num_key_value_heads=sizes.get("num_key_value_heads") or heads,
        num_hidden_layers=sizes["num_hidden_layers"],
        max_position_embeddings=sizes.get("max_position_embeddings"),
    )
