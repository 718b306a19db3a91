"""A small run configuration that breaks no rule, and a model folder that fits it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.data import DataConfig, SourceConfig
from megappo.config.model import ModelConfig, RandomModelConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.supervised import SftConfig


@pytest.fixture
def config() -> RunConfig:
    config = RunConfig(
        model=ModelConfig(path="runs/start/model"),
        data=DataConfig(
            train=SourceConfig(kind="reasoning_gym", task="spell_backward", size=100),
            validation=SourceConfig(kind="reasoning_gym", task="spell_backward", size=10),
            max_prompt_tokens=64,
        ),
        rollout=RolloutConfig(
            engine="hf",
            sampling=SamplingConfig(max_new_tokens=8),
            validation=SamplingConfig(temperature=0.0, max_new_tokens=8),
        ),
        sft=SftConfig(output="runs/start", random_model=RandomModelConfig()),
    )
    config.algorithm.advantage.name = "grpo"
    config.cluster.pools = {"main": 2}
    return config


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 70,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}


@pytest.fixture
def use_model(config: RunConfig, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Makes the run start from a folder whose config.json is that of a small Llama with changes (None: left out)."""

    def use(changes: dict[str, Any]) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        content = {key: value for key, value in (LLAMA | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(content))
        config.model.path, config.sft.random_model = str(folder), None
        return folder

    return use
