"""What a Hugging Face model folder describes, read from its config.json. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import CapabilityError, CheckpointError
from megappo.models.families import FAMILIES, Family

_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelArchitecture:
    """Shape of a dense decoder-only transformer."""

    family: str
    """Name in `megappo.models.families.FAMILIES` (the `model_type` of config.json)."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Size of one head; need not be hidden_size / num_attention_heads."""
    ffn_hidden_size: int
    vocab_size: int
    """Rows of the token embedding (the tokenizer may know fewer tokens)."""
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    """Whether the output layer is the token embedding."""


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
            f"{path}/config.json: model_type={family_name!r} is not supported "
            f"(use one of {', '.join(FAMILIES.names())})"
        )
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise CheckpointError(
            f"{path}/config.json lacks {', '.join(missing)} (a {family_name} model needs {', '.join(_REQUIRED)})"
        )
    _refuse_unsupported(config, path)
    return _from_config(config, family_name, FAMILIES.get(family_name))


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


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings: transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))  # the default of transformers
    return {"type": rope.get("rope_type", rope.get("type", "default")), "theta": float(theta)}


def _refuse_unsupported(config: dict[str, Any], path: str | Path) -> None:
    """Refuse features that would be dropped silently otherwise."""
    found = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
        "quantization_config": (config.get("quantization_config"), None),
        "rope scaling": (_rope(config)["type"], "default"),
        "partial_rotary_factor": (float(config.get("partial_rotary_factor", 1.0)), 1.0),
    }
    for key, (value, supported) in found.items():
        if value != supported:
            raise CapabilityError(
                f"{path}/config.json: {key}={value!r} is not supported (only {supported!r}; use a model without it)"
            )


def _from_config(config: dict[str, Any], family_name: str, family: Family) -> ModelArchitecture:
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
        rope_theta=_rope(config)["theta"],
        rms_norm_eps=config["rms_norm_eps"],
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
