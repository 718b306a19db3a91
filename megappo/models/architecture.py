"""What a Hugging Face model folder describes, read from its config.json. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import CapabilityError, CheckpointError
from megappo.models.families import FAMILIES, ExpertKeys, Family
from megappo.models.rope import Rope, read_rope

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
)


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
    family_name = config.get("model_type")
    if family_name not in FAMILIES.names():
        raise CapabilityError(
            f"{path}/config.json: model_type={family_name!r} is not supported (use one of "
            f"{', '.join(FAMILIES.names())}; a new one is a name table and a registration, see models/families.py)"
        )
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise CheckpointError(
            f"{path}/config.json lacks {', '.join(missing)} (a {family_name} model needs {', '.join(_REQUIRED)})"
        )
    _refuse_unsupported(config, path)
    return _from_config(config, family_name, FAMILIES.get(family_name), file=f"{path}/config.json")


def read_config(folder: Path) -> dict[str, Any]:  # Any: the values of a JSON object
    """Return the content of `<folder>/config.json`. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist (give a local Hugging Face folder)")
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no config.json (give the folder of a Hugging Face model)")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold a JSON object, holds {type(config).__name__}")
    return config


def _refuse_unsupported(config: dict[str, Any], path: str | Path) -> None:
    """Refuse features that would be dropped silently otherwise."""
    found = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
        "quantization_config": (config.get("quantization_config"), None),
        "router_jitter_noise": (float(config.get("router_jitter_noise") or 0.0), 0.0),
    }
    if "use_sliding_window" not in config:
        found["sliding_window"] = (config.get("sliding_window"), None)
    for key, (value, supported) in found.items():
        if value != supported:
            raise CapabilityError(
                f"{path}/config.json: {key}={value!r} is not supported (only {supported!r}; use a model without it)"
            )


def _from_config(config: dict[str, Any], family_name: str, family: Family, *, file: str) -> ModelArchitecture:
    heads = config["num_attention_heads"]
    return ModelArchitecture(
        family=family_name,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope=read_rope(config, default_theta=family.rope_theta, file=file),
        rms_norm_eps=config["rms_norm_eps"],
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=_read_experts(config, family.experts, file) if family.experts else None,
    )


def _read_experts(config: dict[str, Any], keys: ExpertKeys, file: str) -> ExpertArchitecture | None:
    """Read the mixture of experts; None where every layer is dense (`mlp_only_layers`, `decoder_sparse_step`)."""
    num_experts = config.get("num_local_experts", config.get("num_experts"))  # transformers 5 and 4 differ
    wanted = {"num_local_experts": num_experts}
    wanted |= {key: config.get(key) for key in ("num_experts_per_tok", keys.ffn_hidden_size)}
    missing = [key for key, value in wanted.items() if value is None]
    if missing or num_experts is None:
        raise CheckpointError(f"{file} lacks {', '.join(missing)} (a mixture of experts needs {', '.join(wanted)})")
    step = config.get("decoder_sparse_step") or 1
    named = config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    dense = [layer for layer in layers if layer in named or (layer + 1) % step or num_experts == 0]
    if len(dense) == len(layers):
        return None
    # False is the default of transformers.
    normalized = keys.normalize_probs is None or bool(config.get(keys.normalize_probs, False))
    if normalized and config["num_experts_per_tok"] == 1:
        raise CapabilityError(
            f"{file}: num_experts_per_tok=1 gives the one expert of a token the weight 1 whatever the router says, so "
            "the router cannot be trained (use a model with more, or without normalised probabilities)"
        )
    return ExpertArchitecture(
        num_experts=num_experts,
        num_active=config["num_experts_per_tok"],
        ffn_hidden_size=config[keys.ffn_hidden_size],
        normalize_probs=normalized,
        dense_layers=dense,
    )
