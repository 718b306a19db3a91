"""Tiny model folders for the trainers."""

from pathlib import Path

import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.train.batches import VOCAB


def save_policy(folder: Path, *, tied: bool = False, layers: int = 4, seed: int = 0, vocab: int = VOCAB) -> Path:
    """Write a policy."""
    return _save(Qwen2ForCausalLM(_config(tied=tied, layers=layers, vocab=vocab)), folder, seed=seed)


def save_expert_policy(folder: Path) -> Path:
    """Write a policy that is a mixture of four experts, two per token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # type: ignore[call-arg]  # taken by its base class
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
    )
    return _save(Qwen3MoeForCausalLM(config), folder)


def _save(model: PreTrainedModel, folder: Path, *, seed: int = 0) -> Path:
    """Write a model whose weights all count: norms differ from 1, biases from 0. Log-probs lie around -4.2 +- 0.8."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        std = 0.1 if "embed" in name or "lm_head" in name else 0.2
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=std)
    model.save_pretrained(folder)
    return folder


def _config(*, tied: bool = False, layers: int = 4, vocab: int = VOCAB) -> Qwen2Config:
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    config.num_labels = 1
    return config


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def tied_policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("tied_policy"), tied=True)


@pytest.fixture(scope="session")
def critic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(Qwen2ForSequenceClassification(_config()), tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="session")
def expert_policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_expert_policy(tmp_path_factory.mktemp("expert_policy"))
