"""Names and views of the parameters of transformers models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from megappo.rollout.hf_parameters import folder_parameters

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        Qwen3MoeConfig(**SHAPE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6, mlp_only_layers=[1]),
        MixtralConfig(**SHAPE, num_local_experts=3),
    ],
    ids=["llama", "qwen3_moe", "mixtral"],
)
def test_parameters_are_named_and_cut_as_transformers_writes_them(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    views = folder_parameters(model)
    assert views.keys() == saved.keys()
    assert all(torch.equal(views[name], saved[name]) for name in saved)
    with torch.no_grad():
        for view in folder_parameters(model).values():
            view.fill_(1.0)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_a_tied_head_is_a_second_name() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    names = set(folder_parameters(model, remove_duplicate=True))
    assert set(folder_parameters(model)) - names == {"lm_head.weight"}
