"""Recorded steps of real trainers, replayed on other layouts; planted faults are found and named.

Layouts agree to 1e-5 in fp32: sums in another order.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.batch.fields import select
from megappo.cli.main import main
from megappo.cli.replay import ReplayArguments, replay
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, KLConfig, KLInLossConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.record import RecordConfig
from megappo.config.run import RunConfig
from megappo.controller.record_folder import StepRecord, read_record, write_record
from megappo.errors import ConfigError, MegappoError, RecordError
from megappo.replay.jobs import RankJob, RankResult
from megappo.replay.ranks import replay_on_rank
from tests.cli.record_jobs import record_steps
from tests.controller.test_loop import make_config
from tests.dist_world import DistWorld, RankError
from tests.train.conftest import save_expert_policy, save_policy

Replay = Callable[..., tuple[int, dict[str, Any]]]


def recorded_config(model: Path) -> RunConfig:
    """Two mini-batches, two epochs, a critic, a reference; engines that sample something else altogether."""
    kl = KLConfig(in_loss=KLInLossConfig(coef=0.1))
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(name="gae"), kl=kl), steps=3)
    config.model.path = str(model)
    config.data.max_prompt_tokens = 8
    config.batching.mini_batch_prompts = 2
    config.actor.optim.lr = config.critic.optim.lr = 1e-2
    config.rollout.parity = ParityConfig(warn=ParityLimits(), stop=ParityLimits())
    config.record = RecordConfig(steps=[1, 2], weights=True)
    config.cluster.pools = {"main": 1}
    return config


@pytest.fixture(scope="module")
def run_folder(world: DistWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two recorded steps with a checkpoint between them."""
    folder = tmp_path_factory.mktemp("run")
    config = recorded_config(save_policy(folder / "model"))
    (said,) = world.run(
        record_steps, parallelism=ParallelismConfig(), config=config, run=folder, steps=2, checkpoints=[1]
    )
    assert said == []
    return folder


@pytest.fixture
def step_2(run_folder: Path, tmp_path: Path) -> Path:
    """A copy of the record of step 2, on its own."""
    return Path(shutil.copytree(run_folder / "records" / "step_000002", tmp_path / "records" / "step_000002"))


@pytest.fixture
def replayed(world: DistWorld, capsys: pytest.CaptureFixture[str]) -> Replay:
    """Replay in the world of the tests; returns exit code and JSON."""

    def launch(job: RankJob) -> list[RankResult]:
        parallelism = job.config.actor.parallelism if job.role == "actor" else job.config.critic.parallelism
        return world.run(replay_on_rank, parallelism=parallelism, world_size=job.layout.world_size, job=job)

    def run(record: Path, phase: str, *layout: str, **more: Any) -> tuple[int, dict[str, Any]]:
        arguments = ReplayArguments(record=record, phase=phase, layout=layout, as_json=True, launch=launch, **more)
        code = replay(arguments)
        return code, json.loads(capsys.readouterr().out)

    return run


def fields_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {found["name"]: found for found in report["fields"]}


def rewrite(folder: Path, change: Callable[[StepRecord], StepRecord]) -> None:
    """Replace a record by a changed one, which is whole again."""
    record = change(read_record(folder))
    aside = folder.with_name("aside")
    aside.mkdir()
    if (folder / "weights").exists():
        (folder / "weights").rename(aside / "weights")
    write_record(aside, folder, record, extra={})


def test_advantages_come_out_bitwise_and_need_no_weights(step_2: Path, replayed: Replay) -> None:
    shutil.rmtree(step_2 / "weights")
    code, report = replayed(step_2, "advantages", tolerance=0.0)
    assert code == 0 and report["agrees"] and report["weights"] == {}
    assert {found["name"]: found["largest"] for found in report["fields"]} == dict.fromkeys(
        ("token_rewards", "loss_mask", "advantages", "returns"), 0.0
    )
    numbers = {found["name"] for found in report["numbers"]}
    assert {"critic/returns/mean", "whitening/mean", "rollout/truncated_ratio"} <= numbers


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("tensor=2",),
        ("pipeline=2", "critic.parallelism.tensor=2", "critic.parallelism.pipeline=1"),
        pytest.param(("data=3",), marks=pytest.mark.slow),
        pytest.param(("context=2", "data=2"), marks=pytest.mark.slow),
        pytest.param(("tensor=2", "pipeline=2", "sequence=true"), marks=pytest.mark.slow),
        pytest.param(("pipeline=2", "virtual_pipeline=2", "data=2"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_log_probs_and_values_agree_on_every_layout(layout: tuple[str, ...], step_2: Path, replayed: Replay) -> None:
    code, report = replayed(step_2, "log_probs", *layout)
    found = fields_of(report)
    assert code == 0 and report["notes"] == []
    assert set(found) == {"old_log_probs", "rollout_log_probs", "ref_log_probs", "values"}
    response_tokens = int(read_record(step_2).experience.response_mask.sum())
    for name in ("old_log_probs", "ref_log_probs", "values"):
        assert found[name]["largest"] <= 1e-5 and found[name]["is_judged"], name
        assert found[name]["tokens"] == response_tokens
    assert found["rollout_log_probs"]["largest"] > 0.1, "the engine of this run is not the model"
    assert not found["rollout_log_probs"]["is_judged"]
    assert report["numbers"][0]["name"] == "actor/entropy/mean"
    if not layout:
        assert found["old_log_probs"]["largest"] == 0, "cut as it was"


@pytest.mark.parametrize(
    "layout",
    [
        ("tensor=2",),
        pytest.param(("pipeline=2", "data=2"), marks=pytest.mark.slow),
        pytest.param(("pipeline=2", "virtual_pipeline=2"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_an_update_from_a_checkpoint_agrees_in_every_metric(
    layout: tuple[str, ...], run_folder: Path, step_2: Path, replayed: Replay
) -> None:
    checkpoint = run_folder / "checkpoints" / "step_000001"
    code, report = replayed(step_2, "update", *layout, weights=checkpoint)
    recorded = read_record(step_2).metrics
    assert code == 0 and report["notes"] == []
    names = {found["name"]: found for found in report["numbers"]}
    assert set(names) == {*recorded["actor"], *recorded["critic"]}
    assert names["actor/loss/mean"]["recorded"] != names["actor/first_step/loss"]["recorded"]
    assert report["weights"]["critic"] == f"a checkpoint, {checkpoint / 'critic'}"


@pytest.fixture(scope="module")
def expert_run(world: DistWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two recorded steps of mixtures of experts, actor and critic, with a checkpoint between them."""
    folder = tmp_path_factory.mktemp("expert-run")
    config = recorded_config(save_expert_policy(folder / "model"))
    world.run(record_steps, parallelism=ParallelismConfig(), config=config, run=folder, steps=2, checkpoints=[1])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("expert=2", "data=2"),
        ("tensor=2", "sequence=true", "expert=2"),
        ("pipeline=2", "virtual_pipeline=2", "expert=2", "data=2"),
        ("tensor=2", "sequence=true", "expert_tensor=2"),
    ],
    ids=" ".join,
)
def test_experts_are_replayed_on_every_layout(layout: tuple[str, ...], expert_run: Path, replayed: Replay) -> None:
    record, checkpoint = expert_run / "records" / "step_000002", expert_run / "checkpoints" / "step_000001"
    code, report = replayed(record, "log_probs", *layout)
    assert code == 0 and report["notes"] == [], report
    assert {name for name, found in fields_of(report).items() if found["is_judged"]} == {
        "old_log_probs",
        "ref_log_probs",
        "values",
    }
    code, report = replayed(record, "update", *layout, weights=checkpoint)
    recorded = read_record(record).metrics
    assert code == 0 and report["notes"] == [], report
    assert {found["name"] for found in report["numbers"]} == {*recorded["actor"], *recorded["critic"]}


def test_without_optimizer_state_the_first_optimizer_step_is_replayed(step_2: Path, replayed: Replay) -> None:
    code, report = replayed(step_2, "update", "tensor=2")
    assert code == 0
    assert {found["name"]: found["recorded"] is not None for found in report["numbers"]} == {
        f"{role}/first_step/{name}": True for role in ("actor", "critic") for name in ("loss", "grad_norm")
    }
    assert any(
        note.startswith("actor: the first of 4 optimizer steps") and "checkpoint of step 1" in note
        for note in report["notes"]
    )


def test_the_first_step_of_a_run_starts_from_its_model_and_a_fresh_optimizer(
    run_folder: Path, tmp_path: Path, replayed: Replay
) -> None:
    folder = Path(shutil.copytree(run_folder / "records" / "step_000001", tmp_path / "step_000001"))
    shutil.rmtree(folder / "weights")
    rewrite(folder, without_exports)
    code, report = replayed(folder, "update")
    assert code == 0 and len(report["numbers"]) > 20 and report["notes"] == []
    assert report["weights"]["actor"] == f"the weights that the run began with, {run_folder / 'model'}"


def without_exports(record: StepRecord) -> StepRecord:
    """The record of a run with record.weights=false and without checkpoints."""
    references = record.weights.items()
    return replace(
        record, weights={role: replace(known, is_exported=False, checkpoint=None) for role, known in references}
    )


def test_one_changed_log_prob_is_found_and_named(step_2: Path, replayed: Replay) -> None:
    record = read_record(step_2)
    row = 5
    experience = record.experience
    assert experience.old_log_probs is not None
    index = int(experience.offsets[row + 1]) - 2  # the last but one token of sequence 5
    wrong = experience.old_log_probs.copy()
    wrong[index] -= 0.01
    rewrite(step_2, lambda record: replace(record, experience=replace(experience, old_log_probs=wrong)))
    code, report = replayed(step_2, "log_probs")
    found = fields_of(report)
    assert code == 1 and not report["agrees"]
    assert [name for name, field in found.items() if field["is_judged"] and not field["agrees"]] == ["old_log_probs"]
    field, worst, info = found["old_log_probs"], found["old_log_probs"]["worst"], record.sequences[row]
    assert field["largest"] == pytest.approx(0.01, rel=1e-4)
    assert field["mean"] == pytest.approx(0.01 / field["tokens"], rel=1e-3)
    assert (worst["sequence_id"], worst["group_id"], worst["row"]) == (info.sequence_id, info.group_id, info.row)
    assert worst["position"] == info.length - 2 and worst["response_position"] == info.response_tokens - 2
    assert worst["token"] == experience.tokens[index] and worst["recorded"] == pytest.approx(float(wrong[index]))
    assert fields_of(replayed(step_2, "log_probs", tolerance=0.1)[1])["old_log_probs"]["agrees"]


def test_a_wrong_advantage_shows_in_the_advantages_only(step_2: Path, replayed: Replay) -> None:
    record = read_record(step_2)
    wrong = record.experience.advantages.copy()
    wrong[np.flatnonzero(record.experience.response_mask)[7]] = np.nan
    rewrite(step_2, lambda record: replace(record, experience=replace(record.experience, advantages=wrong)))
    code, report = replayed(step_2, "advantages")
    found = fields_of(report)
    assert code == 1 and [name for name, field in found.items() if not field["agrees"]] == ["advantages"]
    assert (found["advantages"]["non_finite_recorded"], found["advantages"]["non_finite_replayed"]) == (1, 0)
    assert found["advantages"]["largest"] == "inf" and found["advantages"]["worst"]["recorded"] == "nan"


def spoil_weight(folder: Path, name: str) -> None:
    """Put a NaN into one tensor of a Hugging Face folder."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_weight_that_is_no_number_is_named(step_2: Path, replayed: Replay) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    spoil_weight(step_2 / "weights" / "actor", name)
    with pytest.raises(RankError, match=rf"of \d+ tensors 1 with other values: {name} \(1 not finite\) "):
        replayed(step_2, "log_probs")
    code, report = replayed(step_2, "log_probs", other_weights=True)
    assert code == 1 and report["non_finite_weights"] == {f"actor {name}": 1}
    found = fields_of(report)["old_log_probs"]
    assert found["non_finite_recorded"] == 0 and found["non_finite_replayed"] == found["tokens"]


@pytest.mark.parametrize("text", [b"null", b"[1]", b"", b"[" * 100_000, bytes(range(256)), b'{"format": 2}'])
def test_every_file_of_a_record_that_is_changed_is_refused_by_name(
    text: bytes, step_2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in [path for path in step_2.iterdir() if path.is_file()]:
        content = file.read_bytes()
        file.write_bytes(text.ljust(len(content), b"\n"))  # its size does not tell
        assert main(["replay", str(step_2), "--phase", "log_probs"]) == 2, file
        assert file.name in capsys.readouterr().err
        file.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_exported_weights_that_are_damaged_are_refused_by_name(name: str, step_2: Path, replayed: Replay) -> None:
    file = step_2 / "weights" / "actor" / name
    file.write_bytes(bytes(range(256)))
    with pytest.raises((MegappoError, RankError), match=name):
        replayed(step_2, "log_probs")


def test_weights_of_a_converted_folder_are_taken_without_an_optimizer(
    run_folder: Path, step_2: Path, tmp_path: Path, replayed: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = run_folder / "checkpoints" / "step_000001" / "actor"
    converted = tmp_path / "converted"
    options = ["--checkpoint", str(actor), "--out", str(converted), "--hf", str(run_folder / "model")]
    assert main(["convert", "reshard", *options, "--weights-only", "--tp", "2"]) == 0
    shutil.rmtree(step_2 / "weights" / "actor")
    capsys.readouterr()
    code, report = replayed(step_2, "update", weights=converted)
    assert code == 0 and report["weights"]["actor"] == f"a converted folder, {converted}"
    assert {found["name"] for found in report["numbers"]} >= {"actor/first_step/loss", "actor/first_step/grad_norm"}


def test_a_model_out_of_its_checkpoint_is_refused_by_its_own_name(
    run_folder: Path, step_2: Path, tmp_path: Path, replayed: Replay
) -> None:
    alone = shutil.copytree(run_folder / "checkpoints" / "step_000001" / "actor", tmp_path / "alone" / "actor")
    with pytest.raises(RecordError, match=f"--weights {alone} is one model of a checkpoint, without the manifest.json"):
        replayed(step_2, "log_probs", weights=alone)


def test_weights_of_another_step_are_refused(run_folder: Path, step_2: Path, replayed: Replay) -> None:
    other = run_folder / "records" / "step_000001" / "weights" / "actor"
    with pytest.raises(RankError, match=r"with other values: lm_head.weight, .* \(give the weights before the update"):
        replayed(step_2, "log_probs", weights=other)


def test_a_few_sequences_are_enough_for_log_probs(step_2: Path, replayed: Replay) -> None:
    def keep_two(record: StepRecord) -> StepRecord:
        kept = [3, 9]
        return replace(
            without_exports(record),
            is_whole=False,
            requests={},
            experience=select(record.experience, kept),
            token_rewards=select(record.token_rewards, kept),
            sequences=[record.sequences[row] for row in kept],
            rewards=[record.rewards[row] for row in kept],
            current=record.current[kept],
            shards=[[record.sequences[row].sequence_id for row in kept]],
        )

    weights = Path(shutil.copytree(step_2 / "weights", step_2.parent / "kept"))
    rewrite(step_2, keep_two)
    code, report = replayed(step_2, "log_probs", weights=weights / "actor")
    assert code == 0 and report["numbers"] == []
    (note,) = report["notes"]
    assert "values are left out" in note and "--critic-weights DIR" in note
    with pytest.raises(RecordError, match=r"holds 2 sequences of its step, .*--phase update needs all of them"):
        replayed(step_2, "update", weights=weights / "actor")


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        (("tensor=3",), {}, r"actor.parallelism.tensor=3 must divide model.num_attention_heads=4"),
        (("pipeline=3",), {}, r"actor.parallelism.pipeline=3 must divide"),
        (("expert=2",), {}, r"actor.parallelism.expert"),
        (("tenser=2",), {}, r"actor.parallelism.tenser=2 is not a key .*did you mean actor.parallelism.tensor\?"),
        (("data=0",), {}, r"--layout data=0 must be a positive number"),
        ((), {"overrides": ["model.dtype=half"]}, r"model.dtype=half must be one of float32, bfloat16"),
        (("data=17",), {}, r"--layout data=17 must be at most 16, the sequences of"),
        (("data=\u00b2",), {}, r"--layout data=\u00b2 must be a positive number"),
        ((), {"overrides": ["batching.micro_batch_tokens=-1"]}, r"batching.micro_batch_tokens=-1"),
        ((), {"tolerance": float("nan")}, r"--tolerance nan must be a number from 0 on"),
        ((), {"tolerance": float("inf")}, r"--tolerance inf must be a number from 0 on"),
        ((), {"tolerance": -1.0}, r"--tolerance -1.0 must be a number from 0 on"),
        ((), {"weights": Path("nowhere")}, r"--weights nowhere holds no weights of the actor"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    layout: tuple[str, ...], more: dict[str, Any], message: str, step_2: Path, replayed: Replay
) -> None:
    with pytest.raises((ConfigError, RecordError), match=message):
        replayed(step_2, "log_probs", *layout, **more)


def test_missing_weights_are_asked_for(step_2: Path, replayed: Replay) -> None:
    rewrite(step_2, without_exports)
    with pytest.raises(RecordError, match=r"the actor's weights before step 2 are not here.*--weights DIR"):
        replayed(step_2, "log_probs")


def test_an_update_of_adapters_needs_a_checkpoint(step_2: Path, replayed: Replay) -> None:
    text = read_record(step_2).config.replace("  lora: null\n", "  lora: {rank: 2}\n", 1)
    rewrite(step_2, lambda record: replace(record, config=text))
    with pytest.raises(RecordError, match=r"holds the sums of weights and adapters \(actor.lora\)"):
        replayed(step_2, "update")


def test_the_command_prints_a_table(step_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(step_2), "--phase", "advantages"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("record    step 2, 16 sequences, ") and printed.endswith("all within tolerance 1e-05\n")
    assert "advantages                         0           0" in printed
    assert main(["replay", str(step_2.parent), "--phase", "advantages"]) == 2
    assert "is no record of a step" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_starts_the_processes_it_needs(step_2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(step_2), "--phase", "log_probs", "--layout", "tensor=2"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "replayed  log_probs on tensor 2" in printed and "all within tolerance 1e-05" in printed
    spoil_weight(step_2 / "weights" / "actor", "model.norm.weight")
    assert main(command) == 2
    assert "1 with other values: model.norm.weight (1 not finite)" in capsys.readouterr().err
