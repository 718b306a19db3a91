"""Shapes of models by name, as the config.json that `megappo` reads. Sizes are those the models were published with,
unless a comment says otherwise."""

import json
from pathlib import Path
from typing import Any

from megappo.errors import ConfigError, Violation
from megappo.planning.model_presets import MODEL_PRESETS

_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_TINY = {
    **_COMMON,
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {**_TINY, "model_type": "qwen3"},
    "tiny_moe": {
        **_TINY,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    **MODEL_PRESETS,
    # The size of DeepSeek-V3 (61 layers, 256 experts of which 8 are active, 3 dense layers; 0.67 T parameters, 35 G
    # active) in the nearest family that can be trained: grouped-query instead of latent attention, no shared expert.
    "deepseek_v3_sized": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 1, 2],
    },
}


def model_config(name: str) -> dict[str, Any]:
    """Return a preset, or the config.json of a folder.

    Raises:
        ConfigError: it is neither.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        return json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        violation = Violation(
            key="--model",
            value=name,
            rule=f"is no preset and no folder with a config.json ({error})",
            remedy=f"use one of {', '.join(PRESETS)}",
        )
        raise ConfigError([violation]) from error


def write_model_folder(config: dict[str, Any], folder: Path) -> Path:
    """Write a folder that holds a config.json and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
