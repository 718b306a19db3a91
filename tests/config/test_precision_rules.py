"""Rules about layers and number formats that only some devices have."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.cluster import DeviceKind
from megappo.config.model import Dtype, Fp8Recipe, LayerSpec
from megappo.config.rules import check_config, check_device, check_files, check_sft_device
from megappo.config.run import RunConfig

NOT_INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
UseModel = Callable[[dict[str, Any]], Path]


def messages(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


def test_fp8_needs_a_gpu_transformer_engine_and_16_bit_parameters(config: RunConfig, use_model: UseModel) -> None:
    use_model({"hidden_size": 64})
    model = config.model
    model.fp8, model.dtype, model.layer_spec = Fp8Recipe.delayed, Dtype.bfloat16, LayerSpec.auto
    config.cluster.device = DeviceKind.auto
    assert check_config(config) == [] == check_files(config)
    config.cluster.device = DeviceKind.cpu  # what auto has turned out to be
    expected = "model.fp8=delayed needs a GPU: fp8 matrix products are CUDA kernels (set model.fp8=null)"
    assert [str(found) for found in check_device(config)] == [expected]
    assert [str(found) for found in check_sft_device(config)] == [expected]
    config.cluster.device, model.layer_spec, model.dtype = DeviceKind.auto, LayerSpec.local, Dtype.float32
    assert [message.partition(" (")[0] for message in messages(config)] == [
        "model.fp8=delayed needs the layers of Transformer Engine",
        "model.fp8=delayed needs 16-bit parameters, not model.dtype=float32",
    ]


def test_fp8_multiplies_whole_blocks_of_features(config: RunConfig, use_model: UseModel) -> None:
    config.model.fp8, config.model.dtype = Fp8Recipe.mxfp8, Dtype.bfloat16
    config.actor.parallelism.tensor = 2
    use_model({"hidden_size": 80, "head_dim": 16, "intermediate_size": 128})
    assert [str(found) for found in check_files(config)] == [
        f"actor.parallelism.tensor=2 leaves a rank {name}, and model.fp8=mxfp8 multiplies blocks of 32 features "
        "(use a smaller one, or model.fp8=null)"
        for name in ("hidden_size=80", "num_key_value_heads * head_dim=16")
    ]
    use_model({"hidden_size": 64, "head_dim": 32, "intermediate_size": 128})
    assert check_files(config) == []


def test_transformer_engine_is_not_for_cpus(config: RunConfig) -> None:
    config.model.layer_spec = LayerSpec.transformer_engine
    assert messages(config) == []
    config.cluster.device = DeviceKind.cpu
    assert messages(config) == [
        "model.layer_spec=transformer_engine cannot be had: Transformer Engine has CUDA kernels only "
        "(use local, or install transformer-engine[pytorch] on a machine with a GPU)"
    ]


@NOT_INSTALLED
def test_transformer_engine_that_is_not_installed_is_missed_before_the_run(config: RunConfig) -> None:
    config.cluster.device, config.cluster.pools = DeviceKind.cuda, {"main": 2, "engines": 1}
    config.cluster.rollout, config.sft.random_model = "engines", None
    config.model.fp8, config.model.dtype = Fp8Recipe.delayed, Dtype.bfloat16
    assert messages(config) == [
        "model.fp8=delayed needs Transformer Engine, which is not installed "
        "(install transformer-engine[pytorch], or set model.fp8=null)"
    ]
    config.model.fp8, config.model.layer_spec = None, LayerSpec.transformer_engine
    (found,) = messages(config)
    assert found.startswith("model.layer_spec=transformer_engine cannot be had: Transformer Engine is not installed")


def test_heads_of_context_ranks_are_counted_once_the_device_is_known(config: RunConfig, use_model: UseModel) -> None:
    use_model({})
    config.cluster.pools = {"main": 8}
    config.actor.parallelism.context = 8
    assert check_files(config) == []  # Transformer Engine, where auto turns out to be a GPU, cuts no heads
    config.cluster.device = DeviceKind.cpu
    assert [str(found) for found in check_device(config)] == [
        "actor.parallelism.context=8 must divide the 4 attention heads of a tensor-parallel rank (use 1, 2 or 4)"
    ]
