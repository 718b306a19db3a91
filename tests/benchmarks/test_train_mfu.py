"""The training-speed benchmark: its work, its refusals, and real runs of the tiny model. Nothing asserts a time."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.train_mfu import main
from benchmarks.training.measurement import bubble_share, describe, describe_table
from benchmarks.training.model_presets import PRESETS, write_model_folder
from benchmarks.training.workload import LengthDistribution, TrainingWork, doubled, make_work
from megappo.balance.layout import RankLayout
from megappo.config.batching import BatchingConfig
from megappo.config.run import RunConfig
from megappo.models.architecture import read_architecture
from megappo.observability.flops import model_flops

ROOT = Path(__file__).parents[2]
LENGTHS = LengthDistribution(mean=40, spread=0.8, longest=90, prompt_share=0.25)
SMALL = ["--mean-tokens", "24", "--longest", "64", "--warmup", "0", "--steps", "1"]


@pytest.fixture
def work() -> TrainingWork:
    batching = BatchingConfig(
        prompts_per_step=6, samples_per_prompt=4, mini_batch_prompts=3, micro_batch_tokens=100, ppo_epochs=2
    )
    layout = RankLayout(pipeline=2, data=2, virtual_pipeline=2)
    return make_work(RunConfig(batching=batching), PRESETS["tiny"], layout, LENGTHS)


def test_lengths_keep_their_bounds_and_prompts_leave_a_response():
    lengths = LENGTHS.draw(1000, seed=0)
    assert lengths.min() >= 2 and lengths.max() == 90
    prompts = LENGTHS.prompts(lengths)
    assert (prompts >= 1).all() and (prompts < lengths).all()
    assert set(LengthDistribution(mean=40, spread=0, longest=90, prompt_share=0).draw(5, seed=0)) == {40}


def test_every_sequence_is_computed_once_per_pass_and_epoch(work: TrainingWork):
    everything = sorted(range(24))
    assert sorted(chain(*work.shards)) == everything
    assert sorted(chain(*chain(*work.plan))) == everything
    for rank, request in enumerate(work.requests):
        named = chain(*(chain(*mini_batch.micro_batches) for mini_batch in request.mini_batches))
        assert sorted(named) == sorted(work.shards[rank]) == sorted(work.shard(rank).sequence_ids.tolist())
        assert (request.epochs, len(request.mini_batches)) == (2, 2)
    assert work.micro_batches % 2 == 0, "the interleaved schedule runs groups of as many as there are stages"


def test_loss_weights_of_an_optimizer_step_sum_to_one_over_all_ranks(work: TrainingWork):
    tokens = np.add.reduceat(work.experience.loss_mask.astype(int), work.experience.offsets[:-1])
    for step in range(2):
        weights = [request.mini_batches[step].loss_weights for request in work.requests]
        assert sum(weight * tokens[i] for part in weights for i, weight in part.items()) == pytest.approx(1, rel=1e-6)


def test_doubled_work_has_each_micro_batch_twice_in_as_many_steps(work: TrainingWork):
    twice = doubled(work)
    assert twice.micro_batches == 2 * work.micro_batches
    for before, after in zip(work.requests, twice.requests, strict=True):
        for small, large in zip(before.mini_batches, after.mini_batches, strict=True):
            half = len(small.micro_batches)
            assert large.micro_batches[:half] == small.micro_batches
            assert [[sequence - 24 for sequence in ids] for ids in large.micro_batches[half:]] == small.micro_batches
    again = twice.shard(1)
    assert len(set(again.sequence_ids.tolist())) == again.num_sequences == 2 * work.shard(1).num_sequences
    assert again.num_tokens == 2 * work.shard(1).num_tokens


@pytest.mark.parametrize(
    ("layout", "micro_batches", "share"),
    [
        (RankLayout(), 8, 0),
        (RankLayout(pipeline=4, data=2), 8, 3 / 11),
        (RankLayout(pipeline=4, virtual_pipeline=2), 8, 3 / 19),
    ],
)
def test_bubble_by_formula(layout: RankLayout, micro_batches: float, share: float):
    assert bubble_share(layout, micro_batches) == pytest.approx(share)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_of_a_family_that_can_be_trained(name: str, tmp_path: Path):
    architecture = read_architecture(write_model_folder(PRESETS[name], tmp_path))
    assert architecture.num_layers == PRESETS[name]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3_8b", 8.0),
        ("qwen3_30b_a3b", 3.3),
        ("deepseek_v3_sized", 35),
        ("qwen2_5_0_5b", 0.63),
        ("qwen2_5_1_5b", 1.78),
    ],
)
def test_presets_have_the_active_parameters_they_are_known_for(name: str, billions: float):
    flops = model_flops(PRESETS[name])
    embedding = PRESETS[name]["vocab_size"] * PRESETS[name]["hidden_size"]
    assert (flops.per_token + flops.per_prediction) / 2 + embedding == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor.parallelism.tensor=3"], "actor.parallelism.tensor=3 must divide model.num_attention_heads=4"),
        (["--ray", "cluster.pools.main=4", "actor.parallelism.pipeline=3"], "pipeline=3 must divide"),
        (["batching.micro_batch_token=9"], "did you mean batching.micro_batch_tokens?"),
        (["--model", "nothing"], "--model=nothing is no preset"),
        (["--sweep", "seed=1", "--sweep", "actor.parallelism.tensor=3"], "actor.parallelism.tensor=3 must divide"),
        (["--longest", "5000"], "--longest=5000 must be from 2 to the model's 4096 positions"),
        (["--steps", "0", "--prompt-share", "1"], "--prompt-share=1.0 must be at least 0 and less than 1"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "report.json"
    assert main([*arguments, "--output", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def run(command: list[str], output: Path) -> dict[str, Any]:
    """Run the program as a person would; returns its report."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command, *SMALL, "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(output.read_text())
    rows = [case["details"] for case in report["cases"].values()]
    for row in rows:
        assert "\n".join(describe(row)) in done.stdout
    if len(rows) > 1:
        assert "\n".join(describe_table(report)) in done.stdout
    return rows[-1]


def check_report(report: dict[str, Any], layout: dict[str, int]) -> None:
    """What holds for every run on CPUs."""
    assert {name: report["layout"][name] for name in layout} == layout
    assert (report["devices"], report["device"], report["device_peak_tflops"]) == (2, "cpu", None)
    assert report["flops"]["backward"] == 2 * report["flops"]["forward"] > 0
    for phase in ("log_probs", "actor_update"):
        assert len(report[phase]["seconds"]) == 1
        assert report[phase]["tokens_per_s_per_device"] > 0 and report[phase]["tflops_per_device"] > 0
        assert "mfu" not in report[phase]
    assert report["peak_memory_bytes"] > 2**20


@pytest.mark.slow
def test_torchrun_measures_two_layouts_of_two_ranks_one_after_the_other(tmp_path: Path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.train_mfu"]
    sweep = ["--sweep", "actor.optim.distributed=true", "--sweep", "actor.parallelism.tensor=2"]
    report = run([*launcher, *sweep], tmp_path / "report.json")
    check_report(report, {"tensor": 2, "data": 1})
    assert (report["launcher"], report["bubble_share"]) == ("torchrun", 0)
    written = json.loads((tmp_path / "report.json").read_text())
    assert list(written["cases"]) == ["actor.optim.distributed=true", "actor.parallelism.tensor=2"]
    check_report(written["cases"]["actor.optim.distributed=true"]["details"], {"tensor": 1, "data": 2})
    figures = written["cases"]["actor.parallelism.tensor=2"]["figures"]
    assert written["columns"] == list(figures) and figures["hand-over s"] > 0 and figures["update MFU"] is None
    lengths = LengthDistribution(mean=24, spread=0.6, longest=64, prompt_share=0.25).draw(32, seed=0)
    assert report["tokens"] == lengths.sum()


@pytest.mark.slow
def test_ray_measures_two_pipeline_stages(tmp_path: Path):
    command = ["-m", "benchmarks.train_mfu", "--ray", "cluster.pools.main=2", "actor.parallelism.pipeline=2"]
    report = run(command, tmp_path / "report.json")
    check_report(report, {"pipeline": 2, "data": 1})
    assert report["launcher"] == "Ray"
    assert report["bubble_share"] == 1 / (report["micro_batches_per_optimizer_step"] + 1)
    assert "fixed_share_measured" in report


@pytest.mark.slow
def test_torchrun_measures_a_mixture_of_experts(tmp_path: Path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.train_mfu"]
    report = run([*launcher, "--model", "tiny_moe", "actor.parallelism.expert=2"], tmp_path / "report.json")
    check_report(report, {"expert": 2, "data": 2})
