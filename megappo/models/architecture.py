"""What a Hugging Face model folder describes, read from its config.json. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.model_families import ExpertKeys
from megappo.config.model_support import (
    dense_layers,
    head_dim,
    key_value_heads,
    missing_sizes,
    normalizes_probs,
    num_experts,
    unsupported_features,
)
from megappo.errors import CapabilityError, CheckpointError
from megappo.models.families import FAMILIES, Family
from megappo.models.rope import Rope, read_rope


@dataclass(kw_only=True, slots=True, frozen=True)
class ExpertArchitecture:
    """The mixture of experts of a model."""

    num_experts: int
    """Experts per sparse layer."""
    num_active: int
    """Experts that a token goes through: those with the largest softmax probabilities of all."""
    ffn_hidden_size: int
    """Size of one expert's feed-forward network."""
    normalize_probs: bool
    """Whether the probabilities of a token's experts, which weight their outputs, are scaled to sum to 1."""
    dense_layers: list[int]
    """Layers without experts, by index, in order."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelArchitecture:
    """Shape of a decoder-only transformer."""

    family: str
    """Name in `megappo.models.families.FAMILIES` (the `model_type` of config.json)."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Size of one head; need not be hidden_size / num_attention_heads."""
    ffn_hidden_size: int
    """Size of a dense layer's feed-forward network."""
    vocab_size: int
    """Rows of the token embedding (the tokenizer may know fewer tokens)."""
    max_position_embeddings: int
    rope: Rope
    rms_norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    """Whether the output layer is the token embedding."""
    experts: ExpertArchitecture | None = None
    """None: all layers are dense."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope.theta

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have one feed-forward network instead of experts."""
        return self.experts is None or bool(self.experts.dense_layers)

    def padded_vocab_size(self, tensor: int) -> int:
        """Return the rows of the embedding and the output layer under tensor parallelism of `tensor` ranks.

        Rows beyond `vocab_size` are zero, belong to no token, take no probability and are never written out.
        """
        return -(-self.vocab_size // tensor) * tensor


def read_architecture(path: str | Path) -> ModelArchitecture:
    """Read `<path>/config.json`.

    Raises:
        CheckpointError: no such folder or file, not JSON, or a key is missing.
        CapabilityError: a family or a feature that is not supported.
    """
    config = read_config(Path(path))
    if faults := unsupported_features(config):
        raise CapabilityError(f"{path}/config.json: {'; '.join(str(fault) for fault in faults)}")
    if faults := missing_sizes(config):
        raise CheckpointError(f"{path}/config.json: {'; '.join(str(fault) for fault in faults)}")
    return _from_config(config, FAMILIES.get(config["model_type"]))


def read_config(folder: Path) -> dict[str, Any]:  # Any: the values of a JSON object
    """Return the content of `<folder>/config.json`. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist (give a local Hugging Face folder)")
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no config.json (give the folder of a Hugging Face model)")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold a JSON object, holds {type(config).__name__}")
    return config


def _from_config(config: dict[str, Any], family: Family) -> ModelArchitecture:
    traits = family.traits
    return ModelArchitecture(
        family=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=key_value_heads(config),
        head_dim=head_dim(config),
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings") or 2048,
        rope=read_rope(config, default_theta=traits.rope_theta),
        rms_norm_eps=config["rms_norm_eps"],
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=_read_experts(config, traits.experts) if traits.experts else None,
    )


def _read_experts(config: dict[str, Any], keys: ExpertKeys) -> ExpertArchitecture | None:
    """Read the mixture of experts; None where every layer is dense."""
    count, dense = num_experts(config), dense_layers(config)
    if not count or len(dense) == config["num_hidden_layers"]:
        return None
    return ExpertArchitecture(
        num_experts=count,
        num_active=config["num_experts_per_tok"],
        ffn_hidden_size=config[keys.ffn_hidden_size],
        normalize_probs=normalizes_probs(config, keys),
        dense_layers=dense,
    )
