"""A small Qwen2-architecture model with random weights, as a Hugging Face folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megappo.config.model import RandomModelConfig
from megappo.config.value_rules import random_model_violations
from megappo.errors import CheckpointError, ConfigError


def make_random_model(config: RandomModelConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, output: str) -> Path:
    """Write model, tokenizer and generation config to `output`; the same seed gives the same weights.

    The folder is written beside its place and renamed, so `output` never holds half a model; a model that is there
    already is replaced.

    Raises:
        ConfigError: the sizes do not fit together.
        CheckpointError: `output` exists and is no model folder.
    """
    if violations := random_model_violations(config):
        raise ConfigError(violations)
    target = Path(output)
    if target.exists() and not (target / "config.json").is_file():
        raise CheckpointError(f"{target} exists and is no model folder (remove it or choose another folder)")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    model = _initialised(config, tokenizer, seed)
    disable_progress_bar()  # one shard, and the bar would cut through the lines of the command
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if target.exists():
            shutil.rmtree(target)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def random_model_config(config: RandomModelConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    """Return the config.json of the model."""
    return Qwen2Config(
        vocab_size=-(-len(tokenizer) // config.vocab_multiple) * config.vocab_multiple,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.init_std,
        tie_word_embeddings=config.tie_word_embeddings,
        **_special_ids(tokenizer),
    )


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:  # Any: int, list or text in transformers
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def _initialised(config: RandomModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """Return the model: weight matrices N(0, init_std), embedding N(0, embedding_std), biases 0, norms 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(random_model_config(config, tokenizer)).float()
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.embedding_std)
    model.generation_config = GenerationConfig(**_special_ids(tokenizer))
    return model
