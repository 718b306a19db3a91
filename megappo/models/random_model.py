"""A small Qwen2-architecture model with random weights, as a Hugging Face folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megappo.config.model import RandomModelConfig
from megappo.errors import CheckpointError, ConfigError, Violation


def make_random_model(config: RandomModelConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, output: str) -> Path:
    """Write model, tokenizer and generation config to `output`; the same seed gives the same weights.

    The folder is written beside its place and renamed, so `output` never holds half a model; a model that is there
    already is replaced.

    Raises:
        ConfigError: the sizes do not fit together.
        CheckpointError: `output` exists and is no model folder.
    """
    _check_sizes(config)
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


def _initialised(config: RandomModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """Return the model: weight matrices N(0, init_std), embedding N(0, embedding_std), biases 0, norms 1."""
    ids: dict[str, Any] = {  # Any: transformers types special token ids as int, list or text
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=-(-len(tokenizer) // config.vocab_multiple) * config.vocab_multiple,
                hidden_size=config.hidden_size,
                intermediate_size=config.ffn_hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                max_position_embeddings=config.max_position_embeddings,
                initializer_range=config.init_std,
                tie_word_embeddings=config.tie_word_embeddings,
                **ids,
            )
        ).float()
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.embedding_std)
    model.generation_config = GenerationConfig(**ids)
    return model


def _check_sizes(config: RandomModelConfig) -> None:
    heads, hidden = config.num_attention_heads, config.hidden_size
    violations: list[Violation] = []
    if hidden % heads:
        rule = f"must be a multiple of num_attention_heads={heads}"
        remedy = f"use {-(-hidden // heads) * heads}"
        violations.append(Violation(key="sft.random_model.hidden_size", value=hidden, rule=rule, remedy=remedy))
    if heads % config.num_key_value_heads:
        violations.append(
            Violation(
                key="sft.random_model.num_key_value_heads",
                value=config.num_key_value_heads,
                rule=f"must divide num_attention_heads={heads}",
                remedy=f"use {', '.join(str(size) for size in range(1, heads + 1) if heads % size == 0)}",
            )
        )
    if violations:
        raise ConfigError(violations)
