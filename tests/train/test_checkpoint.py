"""A resumed trainer is the trainer that was saved; what cannot be saved or loaded is said and changes nothing."""

import shutil
from pathlib import Path

import pytest

from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, OptimizerName, ScheduleKind
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.checkpoint_jobs import (
    fail_to_save,
    load_errors,
    load_histories,
    resume,
    save_histories,
    save_trained,
    train_while_saving,
)
from tests.train.conftest import save_policy

ONE = ParallelismConfig()
TWO = ParallelismConfig(tensor=2)
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
FP32, BF16 = Dtype.float32, Dtype.bfloat16
# Role (of experts: an actor), layout, data-parallel size, optimizer, type of numbers, adapters.
ROWS = {
    "fp32": ("actor", ONE, 1, OPTIM, FP32, None),
    "bf16": ("actor", ONE, 1, OPTIM, BF16, None),
    "tensor": ("actor", ParallelismConfig(tensor=2, sequence=True), 1, OPTIM, FP32, None),
    "virtual pipeline": ("critic", ParallelismConfig(pipeline=2, virtual_pipeline=2), 1, OPTIM, FP32, None),
    "distributed fp32": ("actor", ONE, 2, DISTRIBUTED, FP32, None),
    "distributed bf16": ("critic", ONE, 2, DISTRIBUTED, BF16, None),
    "overlapped": ("actor", ONE, 2, OVERLAPPED, FP32, None),
    "sgd with momentum": ("actor", ONE, 2, MOMENTUM, FP32, None),
    "adapters, distributed": ("actor", ONE, 2, DISTRIBUTED, BF16, LoraConfig(rank=2)),
    "experts, distributed": ("experts", ParallelismConfig(expert=2), 2, DISTRIBUTED, BF16, None),
    "context, distributed": ("actor", ParallelismConfig(context=2), 1, DISTRIBUTED, FP32, None),
}
SLOW = {"tensor", "overlapped", "context, distributed"}


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow) if row in SLOW else row for row in ROWS])
def test_training_goes_on_bitwise_after_a_resume(
    world: DistWorld, request: pytest.FixtureRequest, tmp_path: Path, row: str
) -> None:
    role, layout, data, optim, dtype, lora = ROWS[row]
    folders = {"actor": "policy_folder", "critic": "critic_folder", "experts": "expert_policy_folder"}
    size = layout.model_size * data
    results = world.run(
        resume,
        world_size=size,
        parallelism=layout,
        role="critic" if role == "critic" else "actor",
        folder=str(request.getfixturevalue(folders[role])),
        layout=layout,
        optim=optim,
        dtype=dtype,
        lora=lora,
        checkpoint=str(tmp_path),
    )
    expected = {"same state": True, "same metrics": True, "same random numbers": True, "steps": 4}
    assert results == [expected] * size


@pytest.fixture(scope="module")
def checkpoint(world: DistWorld, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, after a step of Adam in fp32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    world.run(save_trained, parallelism=TWO, folder=str(policy_folder), layout=TWO, checkpoint=str(folder))
    return folder


def test_a_checkpoint_of_something_else_is_refused_by_name(
    world: DistWorld, policy_folder: Path, critic_folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def messages(role: str, folder: Path, *settings: tuple[OptimConfig, Dtype]) -> list[str]:
        (found,) = world.run(
            load_errors,
            parallelism=ONE,
            role=role,
            folder=str(folder),
            layout=ONE,
            settings=list(settings),
            checkpoint=str(checkpoint),
        )
        assert all(untouched for _, untouched in found)
        return [message for message, _ in found]

    sgd, momentum = OptimConfig(name=OptimizerName.sgd), OptimConfig(name=OptimizerName.sgd, momentum=0.9)
    dtype, plain, moving = messages("actor", policy_folder, (OPTIM, BF16), (sgd, FP32), (momentum, FP32))
    assert "it has {'dtype': 'float32'}, the run has {'dtype': 'bfloat16'}" in dtype
    assert "it has {'optimizer': 'adam'}, the run has {'optimizer': 'sgd'}" in plain
    assert "the run has {'optimizer': 'sgd with momentum'}" in moving
    (role,) = messages("critic", critic_folder, (OPTIM, FP32))
    assert "it has {'role': 'actor'}, the run has {'role': 'critic'}" in role
    smaller = save_policy(tmp_path / "smaller", layers=2)
    (size,) = messages("actor", smaller, (OPTIM, FP32))
    assert "it has {'num_layers': 4}, the run has {'num_layers': 2}" in size


def test_histories_of_scales_are_those_of_the_ranks_of_one_layout(
    world: DistWorld, policy_folder: Path, tmp_path: Path
) -> None:
    folder, checkpoint = str(policy_folder), str(tmp_path)
    world.run(save_histories, parallelism=TWO, folder=folder, layout=TWO, checkpoint=checkpoint)
    same = world.run(load_histories, parallelism=TWO, folder=folder, layout=TWO, checkpoint=checkpoint)
    assert same == [[7, 0], [7, 1]]
    other = world.run(load_histories, parallelism=ONE, folder=folder, layout=ONE, checkpoint=checkpoint)
    assert other == [[]], "it begins anew"


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a rank's file is cut short": ("model/__1_0.distcp", _cut_short, "__1_0.distcp has "),
    "a bit of a rank's file": ("model/__1_0.distcp", _flip_a_bit, "__1_0.distcp has another checksum"),
    "a rank's file is missing": ("model/__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
    "the index": ("model/.metadata", _flip_a_bit, ".metadata has another checksum"),
    "the description": ("model/model.json", _cut_short, "model.json has 0 bytes"),
    "the description is missing": ("model/model.json", Path.unlink, "model.json is missing"),
    "the manifest": ("manifest.json", Path.unlink, "holds no manifest.json"),
}


def test_a_damaged_checkpoint_is_refused_before_anything_is_changed(
    world: DistWorld, policy_folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """On every rank, with the rank that found it."""
    for name, (file, damage, expected) in DAMAGE.items():
        damaged = tmp_path / name
        shutil.copytree(checkpoint, damaged)
        damage(damaged / file)
        ranks = world.run(
            load_errors,
            parallelism=TWO,
            role="actor",
            folder=str(policy_folder),
            layout=TWO,
            settings=[(OptimConfig(lr=1e-2), FP32)],
            checkpoint=str(damaged),
        )
        for ((message, untouched),) in ranks:
            assert untouched, name
            assert message.startswith("rank ") and expected in message, name
        assert ranks[0] == ranks[1]


@pytest.mark.parametrize(("layout", "optim"), [(ONE, DISTRIBUTED), (TWO, OPTIM)], ids=["distributed", "tensor"])
def test_training_goes_on_while_a_checkpoint_is_written(
    world: DistWorld, policy_folder: Path, tmp_path: Path, layout: ParallelismConfig, optim: OptimConfig
) -> None:
    for found in world.run(
        train_while_saving,
        world_size=2,
        parallelism=layout,
        folder=str(policy_folder),
        layout=layout,
        optim=optim,
        checkpoint=str(tmp_path),
    ):
        assert "a save is under way" in found.pop("second save")
        assert found == {
            "written before": False,
            "written after": True,
            "second save changed nothing": True,
            "moved on": True,
            "holds what was saved": True,
        }


FAULTS = {
    "no folder": "does not exist",
    "folder removed meanwhile": "No such file or directory",
    "disk full": "No space left on device",
    "file too large": "File too large",
    "disk full for what is shared": "No space left on device",
}


def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_none(
    world: DistWorld, policy_folder: Path, tmp_path: Path
) -> None:
    ranks = world.run(
        fail_to_save,
        parallelism=TWO,
        folder=str(policy_folder),
        layout=TWO,
        optim=OPTIM,
        faults=list(FAULTS),
        checkpoint=str(tmp_path / "checkpoint"),
    )
    assert ranks[0] == ranks[1]
    for fault, reason in FAULTS.items():
        message, untouched = ranks[0][fault]
        assert untouched, fault
        assert reason in message and str(tmp_path) in message, (fault, message)
    assert ranks[0]["disk full"][0].startswith("rank 1: ") and "__1_0.distcp" in ranks[0]["disk full"][0]
    assert ranks[0]["goes on as if nothing had been"] == ("", True)
