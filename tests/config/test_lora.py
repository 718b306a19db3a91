"""What is refused about adapters, before a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.lora import ATTENTION_TARGETS, LoraConfig
from megappo.config.rules import check_config, check_files, check_sft_files
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config

NAMES = "some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=0), "actor.lora.rank=0 must be positive (use 1 or more)"),
        (LoraConfig(alpha=0.0), "actor.lora.alpha=0.0 must be positive (use a number above 0)"),
        (
            LoraConfig(targets=[]),
            f"actor.lora.targets=[] must not be empty (name {NAMES}, or set actor.lora=null)",
        ),
        (
            LoraConfig(targets=["linear_qkv"]),
            f"actor.lora.targets=linear_qkv is no matrix of a layer (use {NAMES})",
        ),
        (
            LoraConfig(targets=["o_proj", "q_proj", "o_proj"]),
            "actor.lora.targets=o_proj is named twice (name it once)",
        ),
        (LoraConfig(targets=["down_proj"]), None),
    ],
)
def test_adapters_that_cannot_be_are_refused(config: RunConfig, lora: LoraConfig, message: str | None) -> None:
    config.actor.lora = lora
    assert [str(violation) for violation in check_config(config)] == ([] if message is None else [message])


def test_adapters_of_a_critic_count_where_there_is_one(config: RunConfig) -> None:
    config.critic.lora = LoraConfig(targets=["x"])
    assert check_config(config) == []
    config.algorithm.advantage.name = "gae"
    assert [violation.key for violation in check_config(config)] == ["critic.lora.targets"]


def test_experts_take_no_adapters(config: RunConfig, use_model: Callable[[dict[str, Any]], Path]) -> None:
    use_model({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    config.actor.lora = LoraConfig(targets=["q_proj", "up_proj"])
    assert [str(violation) for violation in check_files(config)] == [
        "actor.lora.targets=up_proj is for dense models: the experts of this one take no adapters "
        "(use actor.lora.targets=[q_proj,k_proj,v_proj,o_proj])"
    ]
    config.actor.lora.targets = list(ATTENTION_TARGETS)
    assert check_files(config) == []


def test_a_model_made_from_nothing_is_trained_whole(config: RunConfig) -> None:
    config.actor.lora = LoraConfig()
    (found,) = [violation for violation in check_sft_files(config) if violation.key == "actor.lora"]
    assert "cannot train a model made from nothing" in str(found)
    config.sft.random_model = None
    assert "actor.lora" not in {violation.key for violation in check_sft_files(config)}


def test_one_key_switches_adapters_on() -> None:
    assert load_run_config(["experiment=quickstart"]).actor.lora is None
    assert load_run_config(["experiment=quickstart", "actor.lora.rank=4"]).actor.lora == LoraConfig(rank=4)
    assert load_run_config(["experiment=quickstart", "actor.lora={}"]).actor.lora == LoraConfig()
