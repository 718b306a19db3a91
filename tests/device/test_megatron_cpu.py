"""One test per CPU patch: Megatron fails without it and works with it. A failure means that Megatron changed there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megappo.config.parallelism import ParallelismConfig
from tests.device.expert_jobs import outcome_of_gathers, outcome_of_splits
from tests.device.optimizer_jobs import adam_by_hand, train
from tests.dist_world import DistWorld

ROOT = Path(__file__).parents[2]
REPLICAS = ParallelismConfig()
NO_GPU = "not compiled with CUDA|no NVIDIA driver"
"""What torch says, built for a CPU and built for CUDA."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """Patch name -> what happened before and after it, in a fresh process."""
    script = str(ROOT / "tests" / "device" / "patch_steps.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("patch", "failure"),
    [
        ("disable_jit_fuser", "compiled"),
        ("unwrap_compiled_functions", "compiled"),
        ("redirect_cuda_calls", NO_GPU),
        ("use_cpu_random_state", NO_GPU),
        ("name_cpu_tensors_as_cuda", "AssertionError"),
    ],
)
def test_patch_is_needed_and_does_its_work(outcomes: dict[str, list[str]], patch: str, failure: str) -> None:
    before, after = outcomes[patch]
    assert re.search(failure, before)
    assert after == "works"


def tied_embedding_without_patch() -> str:
    """A tied model's second pipeline stage with Megatron's own code."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    patched = LanguageModule.setup_embeddings_and_output_layer
    LanguageModule.setup_embeddings_and_output_layer = patched.megappo_original
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
        )
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=8,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        LanguageModule.setup_embeddings_and_output_layer = patched
    return "works"


def test_ignore_moves_to_cuda_is_needed(world: DistWorld) -> None:
    """That it works is what the pipeline layouts of tests/models/test_parity.py show for tied models."""
    for result in world.run(tied_embedding_without_patch, parallelism=ParallelismConfig(pipeline=2)):
        assert re.search(NO_GPU, result)


def test_give_split_sizes_as_numbers_is_needed_and_does_its_work(world: DistWorld) -> None:
    before, after = (
        world.run(outcome_of_splits, world_size=2, parallelism=REPLICAS, patched=patched) for patched in (False, True)
    )
    assert all("incompatible function arguments" in outcome for outcome in before), before
    assert after == ["works", "works"]


def test_even_out_gathers_is_needed_and_does_its_work(world: DistWorld) -> None:
    before, after = (
        world.run(outcome_of_gathers, world_size=2, parallelism=REPLICAS, patched=patched) for patched in (False, True)
    )
    assert any("invalid tensor size" in outcome for outcome in before), before
    assert after == ["works", "works"]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_megatrons_optimizers_train_as_plain_torch_does(world: DistWorld, distributed: bool, bf16: bool) -> None:
    (expected, _) = world.run(adam_by_hand, world_size=2, parallelism=REPLICAS, steps=3)
    results = world.run(train, world_size=2, parallelism=REPLICAS, distributed=distributed, bf16=bf16, steps=3)
    # bfloat16 weights are rounded to 8 bits after each step.
    tolerance = 2**-7 * 3 if bf16 else 1e-6
    for weights in results:
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)
