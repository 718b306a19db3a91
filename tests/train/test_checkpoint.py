"""A resumed trainer is the trainer that was saved."""

from pathlib import Path

import pytest

from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, OptimizerName, ScheduleKind
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.conftest import save_policy
from tests.train.jobs import load_error, resume, save_new

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, schedule=ScheduleKind.cosine, decay_steps=9)
DISTRIBUTED = OptimConfig(lr=1e-2, weight_decay=0.1, schedule=ScheduleKind.cosine, decay_steps=9, distributed=True)
# The steps before the checkpoint are of the warm-up and the stable part, those after it of the decay.
MOMENTUM = OptimConfig(
    name=OptimizerName.sgd,
    lr=1e-2,
    momentum=0.9,
    warmup_steps=1,
    schedule=ScheduleKind.wsd,
    decay_steps=4,
    final_decay_steps=2,
    overlap_grad_reduce=True,
)
OVERLAPPED = OptimConfig(lr=1e-2, distributed=True, overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.mark.parametrize(
    ("layout", "data", "optim", "dtype"),
    [
        (ParallelismConfig(), 1, OPTIM, Dtype.float32),
        (ParallelismConfig(), 1, OPTIM, Dtype.bfloat16),
        (ParallelismConfig(tensor=2, sequence=True), 1, OPTIM, Dtype.float32),
        (ParallelismConfig(pipeline=2, virtual_pipeline=2), 1, OPTIM, Dtype.float32),
        (ParallelismConfig(), 2, DISTRIBUTED, Dtype.float32),
        (ParallelismConfig(), 2, DISTRIBUTED, Dtype.bfloat16),
        (ParallelismConfig(), 2, OVERLAPPED, Dtype.float32),
        (ParallelismConfig(), 2, MOMENTUM, Dtype.float32),
        pytest.param(ParallelismConfig(context=2), 1, DISTRIBUTED, Dtype.float32, marks=pytest.mark.slow),
    ],
    ids=[
        "fp32",
        "bf16",
        "tensor",
        "virtual pipeline",
        "distributed fp32",
        "distributed bf16",
        "overlapped",
        "sgd with momentum",
        "context, distributed",
    ],
)
def test_training_goes_on_bitwise_after_a_resume(
    world: DistWorld,
    policy_folder: Path,
    tmp_path: Path,
    layout: ParallelismConfig,
    data: int,
    optim: OptimConfig,
    dtype: Dtype,
) -> None:
    results = world.run(
        resume,
        world_size=layout.model_size * data,
        parallelism=layout,
        folder=str(policy_folder),
        layout=layout,
        optim=optim,
        dtype=dtype,
        checkpoint=str(tmp_path),
    )
    expected = {"same state": True, "same metrics": True, "same random numbers": True, "steps": 4}
    assert results == [expected] * (layout.model_size * data)


def test_a_checkpoint_of_another_layout_or_model_is_refused_by_name(
    world: DistWorld, policy_folder: Path, tmp_path: Path
) -> None:
    one, two = ParallelismConfig(), ParallelismConfig(tensor=2)
    folder = str(policy_folder)
    world.run(save_new, parallelism=one, folder=folder, layout=one, checkpoint=str(tmp_path))
    for message, untouched in world.run(
        load_error, parallelism=two, folder=folder, layout=two, checkpoint=str(tmp_path)
    ):
        assert untouched
        assert "'world_size': 1" in message and "'world_size': 2" in message and "'tensor': 2" in message
    smaller = save_policy(tmp_path / "smaller", layers=2)
    message, untouched = world.run(
        load_error, parallelism=one, folder=str(smaller), layout=one, checkpoint=str(tmp_path)
    )[0]
    assert untouched
    assert "'num_layers': 4" in message and "'num_layers': 2" in message


def test_a_damaged_or_missing_file_is_named(world: DistWorld, policy_folder: Path, tmp_path: Path) -> None:
    one = ParallelismConfig()

    def message() -> str:
        run = world.run(load_error, parallelism=one, folder=str(policy_folder), layout=one, checkpoint=str(tmp_path))
        assert run[0][1]
        return run[0][0]

    assert "layout.json cannot be read" in message()
    world.run(save_new, parallelism=one, folder=str(policy_folder), layout=one, checkpoint=str(tmp_path))
    file = tmp_path / "rank_00000.pt"
    file.write_bytes(file.read_bytes()[:1000])
    assert "rank_00000.pt cannot be read" in message()
