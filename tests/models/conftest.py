"""Tiny random Hugging Face models, one folder per family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# head_dim 12 is not hidden_size / heads = 8; two queries share a key/value head.
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
# One dense layer among the sparse ones; two of four experts per token.
EXPERTS = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return a function that writes (once) a model of a family and returns its folder."""
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            torch.manual_seed(0)
            rope = {"rope_type": "default", "rope_theta": 5e4}
            config = CONFIGS[family](**{**SHAPE, **EXPERTS.get(family, {}), "rope_parameters": rope, **changes})
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                # Every weight counts: norms differ from 1, biases from 0, and logits are of order 1.
                torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
            made[key] = tmp_path_factory.mktemp(family) / "model"
            model.save_pretrained(made[key])
        return made[key]

    return make
