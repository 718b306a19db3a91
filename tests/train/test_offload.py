"""A trainer whose tensors leave device memory between phases computes what one does that keeps them (bitwise)."""

from pathlib import Path

import pytest
import torch

from megappo.config.memory import OffloadConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, OptimizerName
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.training_jobs import train_with_offload

ALL = OffloadConfig(params=True, grads=True, optimizer=True)
SETTINGS = [OffloadConfig(), ALL, OffloadConfig(params=True), OffloadConfig(grads=True), OffloadConfig(optimizer=True)]
TWO_SETTINGS = SETTINGS[:2]
MOMENTUM = OptimConfig(lr=1e-2, name=OptimizerName.sgd, momentum=0.9)
OVERLAPPED = OptimConfig(lr=1e-2, distributed=True, overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.mark.parametrize(
    ("layout", "data", "optim", "dtype", "settings"),
    [
        (ParallelismConfig(), 1, OptimConfig(lr=1e-2), Dtype.float32, SETTINGS),
        (ParallelismConfig(), 1, OptimConfig(lr=1e-2), Dtype.bfloat16, TWO_SETTINGS),
        (ParallelismConfig(), 1, MOMENTUM, Dtype.float32, TWO_SETTINGS),
        (ParallelismConfig(pipeline=2), 1, OptimConfig(lr=1e-2), Dtype.float32, TWO_SETTINGS),
        (ParallelismConfig(), 2, OptimConfig(lr=1e-2, distributed=True), Dtype.float32, TWO_SETTINGS),
        (ParallelismConfig(), 2, OVERLAPPED, Dtype.bfloat16, TWO_SETTINGS),
        pytest.param(ParallelismConfig(), 2, OVERLAPPED, Dtype.bfloat16, SETTINGS, marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16", "sgd", "pipeline", "distributed fp32", "overlapped bf16", "overlapped bf16, every setting"],
)
def test_offload_changes_no_number(
    world: DistWorld,
    policy_folder: Path,
    layout: ParallelismConfig,
    data: int,
    optim: OptimConfig,
    dtype: Dtype,
    settings: list[OffloadConfig],
) -> None:
    ranks = world.run(
        train_with_offload,
        world_size=layout.model_size * data,
        parallelism=layout,
        folder=str(policy_folder),
        layout=layout,
        optim=optim,
        dtype=dtype,
        settings=settings,
    )
    for kept, *moved in ranks:
        assert not any(any(found.values()) for found in kept["out"])
        for setting, result in zip(settings[1:], moved, strict=True):
            assert result["found"] == kept["found"], setting
            assert all(torch.equal(*pair) for pair in zip(result["state"], kept["state"], strict=True)), setting


def test_what_is_offloaded_occupies_no_memory_and_the_rest_stays(world: DistWorld, policy_folder: Path) -> None:
    one = ParallelismConfig()
    (results,) = world.run(
        train_with_offload,
        parallelism=one,
        folder=str(policy_folder),
        layout=one,
        optim=OptimConfig(lr=1e-2),
        dtype=Dtype.bfloat16,
        settings=SETTINGS,
    )
    for setting, result in zip(SETTINGS, results, strict=True):
        at_start, before_hand_over, between_steps, _ = result["out"]
        assert at_start == {"params": setting.params, "grads": setting.grads, "moments": None}
        assert before_hand_over == {"params": False, "grads": setting.grads, "moments": setting.optimizer}
        assert between_steps == {"params": setting.params, "grads": setting.grads, "moments": setting.optimizer}
