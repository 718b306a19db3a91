"""Reward models small enough for tests, as Hugging Face folders."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForSequenceClassification

HIDDEN_SIZE = 64


def make_random_reward_model(folder: Path, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> Path:
    """Write a one-label model with random weights: its score depends on every token of the text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(tokenizer)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.5)
    return _save(model, tokenizer, folder)


def make_last_character_model(folder: Path, tokenizer: PreTrainedTokenizerBase, scores: Mapping[str, float]) -> Path:
    """Write a model that scores a text by its last character: `scores[character]`, 0 for others.

    Layers add nothing to the residual stream, so what is normed and read at the last token is its embedding, a unit
    vector of its own: norm scales it by sqrt(hidden size).
    """
    model = _model(tokenizer)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), HIDDEN_SIZE))
        model.score.weight.zero_()
        for character, score in scores.items():
            token = tokenizer.convert_tokens_to_ids(character)
            assert isinstance(token, int)
            model.score.weight[0, token] = score / math.sqrt(HIDDEN_SIZE)
    return _save(model, tokenizer, folder)


def _model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForSequenceClassification:
    assert len(tokenizer) <= HIDDEN_SIZE
    pad_token_id: Any = tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=pad_token_id,
    )
    config.num_labels = 1
    return Qwen2ForSequenceClassification(config).float()


def _save(model: Qwen2ForSequenceClassification, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
