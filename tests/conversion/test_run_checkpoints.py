"""Checkpoints of trainers: exported, rewritten for another layout, verified, and refused while they are none."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megappo.checkpoint.health import Checksums, check
from megappo.cli.main import main
from megappo.config.lora import LoraConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.conversion import torch_dist
from megappo.models.description import read_description
from tests.conversion.conftest import assert_same, change_tensors, tensors_of
from tests.conversion.conversion_jobs import State, resume_run, save_run
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel

TENSOR = ParallelismConfig(tensor=2)
PIPELINE = ParallelismConfig(pipeline=2)
LORA = LoraConfig(rank=2, alpha=3.0, targets=["q_proj", "v_proj", "o_proj", "up_proj"])


@dataclass
class Run:
    """A folder as a run makes it, with a checkpoint of step 40 of two ranks."""

    path: Path
    start: Path
    """The model that it started from."""
    exported: dict[str, State]
    """Role -> what its trainer exports."""

    @property
    def step(self) -> Path:
        return self.path / "checkpoints" / "step_000040"


MakeRun = Callable[..., Run]


@pytest.fixture(scope="module")
def make_run(world: DistWorld, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """Return a function that makes a run of some roles."""

    def make(roles: tuple[str, ...] = ("actor",), lora: LoraConfig | None = None) -> Run:
        start = make_model("qwen2", vocab_size=97)
        path = tmp_path_factory.mktemp("runs") / "x"
        step = path / "checkpoints" / "step_000040"
        arguments = {"step": str(step), "models": dict.fromkeys(roles, str(start)), "lora": lora, "seed": 3}
        ranks = world.run(save_run, parallelism=TENSOR, layout=TENSOR, **arguments)
        (path / "checkpoints" / "latest").write_text("step_000040")
        exported = {role: joined([rank[role] for rank in ranks]) for role in roles}
        return Run(path=path, start=start, exported=exported)

    return make


@pytest.fixture(scope="module")
def run(make_run: MakeRun) -> Run:
    return make_run(("actor", "critic"))


@pytest.fixture(scope="module")
def adapter_run(make_run: MakeRun) -> Run:
    return make_run(lora=LORA)


def joined(states: list[State]) -> State:
    """What all ranks export."""
    return {name: value for state in states for name, value in state.items()}


def convert(form: str, *options: object) -> int:
    return main(["convert", form, *map(str, options)])


def test_both_models_of_a_run_are_what_their_trainers_export(run: Run, tmp_path: Path) -> None:
    assert convert("megatron-to-hf", "--checkpoint", run.step, "--out", tmp_path / "actor") == 0
    assert convert("megatron-to-hf", "--checkpoint", run.step, "--role", "critic", "--out", tmp_path / "critic") == 0
    for role, exported in run.exported.items():
        assert_same(tensors_of(tmp_path / role), exported)
    assert not torch.equal(run.exported["actor"]["model.norm.weight"], tensors_of(run.start)["model.norm.weight"])
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert critic.config.num_labels == 1
    assert torch.equal(critic.score.weight, run.exported["critic"]["score.weight"])


def test_a_run_is_exported_by_its_step_or_the_newest(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--run", str(run.path), "--step", "40", "--dtype", "bfloat16"]) == 0
    folder = run.path / "hf" / "step_000040"
    expected = {name: value.to(torch.bfloat16) for name, value in run.exported["actor"].items()}
    assert_same(tensors_of(folder), expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["export", "--run", str(run.path), "--overwrite"]) == 0
    assert_same(tensors_of(folder), run.exported["actor"])
    capsys.readouterr()
    assert main(["export", "--run", str(run.path), "--step", "41"]) == 2
    assert "has no checkpoint of step 41 (it has step_000040)" in capsys.readouterr().err


def test_the_newest_whole_checkpoint_is_exported_whatever_a_kill_left(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run.path, tmp_path / "x"))
    checkpoints = copy / "checkpoints"
    (checkpoints / "latest").unlink()  # killed before the pointer moved
    assert main(["export", "--run", str(copy), "--out", str(tmp_path / "a")]) == 0
    assert "holds checkpoints but no 'latest'" in capsys.readouterr().out
    # Killed while another of the same step was moved into place.
    (checkpoints / "step_000040").rename(checkpoints / "step_000040.replaced")
    for step in ([], ["--step", "40"]):
        assert main(["export", "--run", str(copy), "--out", str(tmp_path / "b"), "--overwrite", *step]) == 0
        assert_same(tensors_of(tmp_path / "b"), run.exported["actor"])
    assert main(["export", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "c")]) == 2
    assert f"{tmp_path / 'none'} does not exist" in capsys.readouterr().err


def test_a_checkpoint_under_way_or_gone_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.step, tmp_path / "step_000050.writing")
    out = ("--out", tmp_path / "out")
    assert convert("megatron-to-hf", "--checkpoint", tmp_path / "step_000050.writing", *out) == 2
    assert "is being written" in capsys.readouterr().err
    assert convert("megatron-to-hf", "--checkpoint", run.step.with_name("step_000020"), *out) == 2
    assert "step_000020 does not exist (there are step_000040)" in capsys.readouterr().err
    assert convert("megatron-to-hf", "--checkpoint", run.step, "--role", "critic", "--hf", tmp_path, *out) == 2
    assert "holds no config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_an_error_that_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "step_000040"
    shutil.copytree(run.step, step)
    read = torch_dist.FileSystemReader.read_data
    calls: list[object] = []

    def read_and_delete(reader, plan, planner):  # a run deletes it after the third tensor
        calls.append(plan)
        if len(calls) == 3:
            shutil.rmtree(step)
        return read(reader, plan, planner)

    monkeypatch.setattr(torch_dist.FileSystemReader, "read_data", read_and_delete)
    assert convert("megatron-to-hf", "--checkpoint", step, "--out", tmp_path / "out") == 2
    assert "the folder was removed meanwhile, as a run does with older checkpoints" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_rewritten_checkpoint_is_whole_and_resumes_under_its_layout(
    world: DistWorld, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "step_000040"
    assert convert("reshard", "--checkpoint", run.step, "--out", out, "--pp", 2) == 0
    health = check(out, Checksums.full)
    assert health.problems == [] and health.manifest is not None and health.manifest.step == 40
    assert (out / "loop.json").read_text() == "{}"
    assert convert("verify", "--checkpoint", out) == 0
    models = dict.fromkeys(("actor", "critic"), str(run.start))
    resumed: list[dict[str, State]] = []
    for step in (out, run.step):
        ranks = world.run(resume_run, parallelism=PIPELINE, layout=PIPELINE, step=str(step), models=models)
        resumed.append({when: joined([rank[when] for rank in ranks]) for when in ranks[0]})
    for role, exported in run.exported.items():
        assert_same(resumed[0][role], exported)
    # The optimizers' state came along: the next update is the one after the checkpoint itself.
    for when, expected in resumed[1].items():
        assert_same(resumed[0][when], expected)


def test_weights_alone_are_rewritten_smaller_and_convert(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "weights", tmp_path / "back"
    options = ("--checkpoint", run.step / "actor", "--out", out, "--weights-only", "--tp", 2, "--pp", 2)
    assert convert("reshard", *options) == 0
    assert read_description(out).optimizer is None
    sizes = [sum(file.stat().st_size for file in folder.glob("*.distcp")) for folder in (out, run.step / "actor")]
    assert sizes[0] < 0.45 * sizes[1] and len(list(out.glob("*.distcp"))) == 4
    assert convert("megatron-to-hf", "--checkpoint", out, "--out", back) == 0
    assert_same(tensors_of(back), run.exported["actor"])
    assert convert("verify", "--checkpoint", out) == 2
    assert "holds no checksums" in capsys.readouterr().err


def test_one_model_of_a_checkpoint_is_nothing_to_resume_from(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("reshard", "--checkpoint", run.step / "actor", "--out", tmp_path / "out") == 2
    assert f"give the folder of all of it, {run.step}, or --weights-only" in capsys.readouterr().err


def test_verify_tells_damage_and_other_weights(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back = tmp_path / "back"
    assert convert("megatron-to-hf", "--checkpoint", run.step, "--out", back) == 0
    assert convert("verify", "--checkpoint", run.step, "--hf", back) == 0
    num = len(run.exported["actor"])
    assert f"the same weights: {num} of {num} tensors bit by bit" in capsys.readouterr().out
    # All but the head was raised by a quarter, in one step of rounding.
    assert convert("verify", "--checkpoint", run.step, "--hf", run.start) == 1
    assert f"NOT the same weights: 0 of {num} tensors bit by bit, largest difference 0.25" in capsys.readouterr().out
    assert convert("verify", "--checkpoint", run.step, "--hf", run.start, "--tolerance", 0.2501) == 0
    for tolerance in ("-1", "nan", "inf"):
        assert convert("verify", "--checkpoint", run.step, "--hf", back, "--tolerance", tolerance) == 2
        assert "must be a number from 0 on (use for example 0.01)" in capsys.readouterr().err
    assert convert("verify", "--checkpoint", run.step, "--tolerance", 0.1) == 2
    assert "--tolerance=0.1 is for a comparison of weights" in capsys.readouterr().err

    damaged = tmp_path / "step_000040"
    shutil.copytree(run.step, damaged)
    file = damaged / "actor" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert convert("verify", "--checkpoint", damaged) == 1
    assert "actor/__1_0.distcp has another checksum than when it was written" in capsys.readouterr().out


def test_adapters_are_merged_as_the_trainer_merges_them(adapter_run: Run, tmp_path: Path) -> None:
    assert convert("megatron-to-hf", "--checkpoint", adapter_run.step, "--out", tmp_path / "out") == 0
    found, expected, start = tensors_of(tmp_path / "out"), adapter_run.exported["actor"], tensors_of(adapter_run.start)
    assert found.keys() == expected.keys()
    changed = set()
    for name, tensor in expected.items():
        # Sums of the same two factors; the products may be rounded in another order.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
        changed |= {name.split(".")[-2]} if not torch.equal(found[name], start[name]) else set()
    assert changed == set(LORA.targets)


def test_adapters_alone_are_what_peft_reads(adapter_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert convert("megatron-to-hf", "--checkpoint", adapter_run.step, "--out", out, "--adapters-only") == 0
    files = {file.name for file in out.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "conversion.json"}
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 3.0)
    assert config["target_modules"] == LORA.targets and config["task_type"] == "CAUSAL_LM"
    factors = load_file(out / "adapter_model.safetensors")
    assert len(factors) == 2 * 4 * 4  # two factors of four matrices in four layers
    start, merged = tensors_of(adapter_run.start), adapter_run.exported["actor"]
    for name in ("model.layers.1.self_attn.o_proj", "model.layers.3.mlp.up_proj"):
        down, up = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        expected = start[f"{name}.weight"] + LORA.alpha / LORA.rank * up @ down
        torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=0, atol=1e-6)


def test_adapters_are_not_merged_into_another_model(
    adapter_run: Run, make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter_run.start, other)
    change_tensors(other, lambda tensors: tensors["model.norm.weight"].add_(1))
    options = ("--checkpoint", adapter_run.step, "--out", tmp_path / "out", "--hf", other)
    assert convert("megatron-to-hf", *options) == 2
    assert "is not the model beside which the adapters of" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_adapters_alone_need_adapters(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("megatron-to-hf", "--checkpoint", run.step, "--out", tmp_path / "out", "--adapters-only") == 2
    assert "--adapters-only=True is for checkpoints of adapters" in capsys.readouterr().err
