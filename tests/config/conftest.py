"""A small run configuration that breaks no rule."""

import pytest

from megappo.config.data import DataConfig, SourceConfig
from megappo.config.model import ModelConfig, RandomModelConfig
from megappo.config.record import SftConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig


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
