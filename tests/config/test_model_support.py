"""Which models are refused before a run, in which words. What is read of those that are not: tests/models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.model_families import MODEL_FAMILIES
from megappo.config.parallelism import ParallelismConfig
from megappo.config.rules import check_config, check_files
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.errors import ConfigError
from megappo.models.families import FAMILIES

UseModel = Callable[[dict[str, Any]], Path]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


def test_families_have_traits_and_names() -> None:
    assert FAMILIES.names() == sorted(MODEL_FAMILIES)


def test_a_supported_model_breaks_no_rule(config: RunConfig, use_model: UseModel) -> None:
    use_model({})
    assert check_files(config) == []


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"model_type": "gpt2", "hidden_act": "gelu"}, ["model_type='gpt2' is not supported"]),
        ({"model_type": None}, ["model_type=None is not supported"]),
        ({"model_type": ["llama"]}, ["model_type=['llama'] is not supported"]),
        ({"attention_bias": True, "mlp_bias": True}, ["attention_bias=True is", "mlp_bias=True is not supported"]),
        ({"sliding_window": 4096}, ["sliding_window=4096 is not supported"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config={'bits': 4} is not supported"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5 is not supported"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope scaling='longrope' is not supported"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters of their own for full_"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope scaling 'yarn' lacks factor"]),
        ({"rope_theta": "10000"}, ["rope_theta='10000' must be a number above 0"]),
        ({"hidden_size": None, "rms_norm_eps": None}, ["lacks hidden_size, rms_norm_eps"]),
        ({"rms_norm_eps": "1e-6", "num_key_value_heads": None}, ["rms_norm_eps='1e-6' must be a number above 0"]),
        ({"num_attention_heads": 0, "vocab_size": "70"}, ["num_attention_heads=0 must be a whole", "vocab_size='70'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3 must divide num_attention_heads=4"]),
        ({"hidden_size": 66}, ["num_attention_heads=4 must divide hidden_size=66 without head_dim"]),
        ({"head_dim": 15}, ["head_dim=15 must be even"]),
        ({"model_type": "mixtral"}, ["lacks num_local_experts, num_experts_per_tok"]),
        ({"model_type": "qwen3_moe", **MOE, "moe_intermediate_size": None}, ["lacks moe_intermediate_size"]),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1},
            ["num_experts_per_tok=1 gives the one expert"],
        ),
        (
            {"hidden_act": "gelu", "vocab_size": None, "num_attention_heads": 4.0},
            ["hidden_act='gelu' is not supported", "lacks vocab_size", "num_attention_heads=4.0 must be a whole"],
        ),
    ],
)
def test_all_that_cannot_be_trained_of_a_model_is_told_before_a_run(
    config: RunConfig, use_model: UseModel, changes: dict[str, Any], problems: list[str]
) -> None:
    folder = use_model(changes)
    config.actor.parallelism = ParallelismConfig(tensor=3)  # of which nothing can be said
    found = check_files(config)
    assert len(found) == len(problems)
    for violation, problem in zip(found, problems):
        assert str(violation).startswith(f"model.path={folder} cannot be trained: {problem}")


def test_a_critic_of_its_own_is_looked_at_too(config: RunConfig, use_model: UseModel, tmp_path: Path) -> None:
    use_model({})
    config.algorithm.advantage.name = "gae"
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text('{"model_type": "bert"}')
    config.critic.path = str(tmp_path / "critic")
    (violation,) = check_files(config)
    assert violation.key == "critic.path" and violation.rule == "cannot be trained: model_type='bert' is not supported"


def test_the_bridge_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.family=bridge cannot be had: Megatron-Bridge takes no release"):
        load_run_config(["experiment=quickstart", "model.family=bridge"])


def test_micro_batches_fill_the_groups_of_the_interleaved_schedule(config: RunConfig) -> None:
    config.cluster.pools = {"main": 4}
    config.actor.parallelism = ParallelismConfig(pipeline=2, virtual_pipeline=2)
    config.batching.min_micro_batches = 1
    assert [str(violation) for violation in check_config(config)] == [
        "batching.min_micro_batches=1 is too few, and actor.parallelism.virtual_pipeline runs them in groups of "
        "pipeline=2 (use 2 or more, or null)"
    ]
    config.batching.min_micro_batches = None
    assert check_config(config) == []
    config.batching.prompts_per_step, config.batching.samples_per_prompt = 1, 3
    (violation,) = check_config(config)
    assert violation.key == "actor.parallelism.virtual_pipeline"
    assert "pipeline=2 of them on each of 2 data-parallel ranks, and a mini-batch has 3 sequences" in violation.rule


def test_an_object_store_that_ray_refuses_is_refused_before(config: RunConfig) -> None:
    ray_constants = pytest.importorskip("ray._private.ray_constants")
    config.cluster.object_store_bytes = ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES
    assert check_config(config) == []
    config.cluster.object_store_bytes -= 1
    (violation,) = check_config(config)
    assert violation.key == "cluster.object_store_bytes"


def test_the_model_that_sft_makes_can_be_made(config: RunConfig) -> None:
    assert config.sft.random_model is not None
    config.sft.random_model.hidden_size, config.sft.random_model.num_key_value_heads = 132, 3
    assert [str(violation) for violation in check_config(config)] == [
        "sft.random_model.hidden_size=132 must be a multiple of 2 * num_attention_heads=4: rotary embeddings turn "
        "pairs (use 136)",
        "sft.random_model.num_key_value_heads=3 must divide num_attention_heads=4 (use 1, 2 or 4)",
    ]
