"""The sampling-speed benchmark: what times amount to, its work, its refusals, real runs. Nothing asserts a time."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.generation.timeline import GroupSpan, measure_tail
from benchmarks.generation.workload import Lengths, make_generation
from benchmarks.rollout import main
from benchmarks.training.model_presets import PRESETS
from benchmarks.training.workload import LengthDistribution
from megappo.config.rollout import SamplingConfig

PROMPTS = LengthDistribution(mean=20, spread=0.6, longest=50, prompt_share=0)


def test_tail_of_two_groups_by_hand() -> None:
    spans = [
        GroupSpan(start_s=0, end_s=10, response_tokens=[10, 5]),
        GroupSpan(start_s=0, end_s=4, response_tokens=[4, 4]),
    ]
    # Busy slots: 4 until 4 s, 2 until 5 s, 1 until 10 s; 4 tokens/s while all are busy, 23 tokens in all.
    tail = measure_tail(spans, 4)
    assert tail.makespan_s == 10
    assert tail.utilisation == pytest.approx((16 + 2 + 5) / 40)
    assert tail.below_half_share == pytest.approx(5 / 10)
    assert tail.makespan_over_ideal == pytest.approx(10 / (23 / 4))
    assert measure_tail(spans, 100).makespan_over_ideal is None, "never full, so nobody knows how fast full ones are"


def test_time_in_which_nothing_runs_counts_as_tail() -> None:
    spans = [
        GroupSpan(start_s=0, end_s=2, response_tokens=[4]),
        GroupSpan(start_s=3, end_s=4, response_tokens=[2, 0]),
    ]
    tail = measure_tail(spans, 1)
    assert (tail.makespan_s, tail.utilisation, tail.below_half_share) == (4, 0.75, 0.25)
    assert tail.makespan_over_ideal == pytest.approx(4 / 3)


def test_stop_tokens_give_the_asked_for_mean_and_some_prompts_a_longer_one() -> None:
    lengths = Lengths(prompts=PROMPTS, response_mean=16, longest_response=99, tail_share=0.25, tail_factor=4)
    work = make_generation(lengths, SamplingConfig(), PRESETS["tiny"], prompts=40, samples=3, seed=0)
    assert work.sequences == 120 and sum(work.batch.values()) == 10
    short, long = work.samplings
    assert (len(short.stop_token_ids), len(long.stop_token_ids)) == (1024 // 16, 1024 // 64)
    assert set(long.stop_token_ids) < set(short.stop_token_ids)
    assert short.max_new_tokens == long.max_new_tokens == 99
    asked = [tuple(request.prompt_tokens) for request in work.requests.values()]
    assert len({*asked, *map(tuple, work.probes)}) == len(asked) + len(work.probes), "no prompt is another's prefix"
    assert max(len(tokens) for tokens in asked) <= 50 and np.ptp([len(tokens) for tokens in asked]) > 0
    fixed = Lengths(prompts=PROMPTS, response_mean=0, longest_response=9, tail_share=0, tail_factor=1)
    same = make_generation(fixed, SamplingConfig(), PRESETS["tiny"], prompts=2, samples=1, seed=0)
    assert same.samplings[0].stop_token_ids == [] and set(same.batch.values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "two"], "--engines=two must be positive integers"),
        (["--tail-share", "2", "--rounds", "0"], "--tail-share=2.0 must be from 0 to 1"),
        (["--longest-response", "5000"], "--longest-response=5000 must fit, with the prompt, into the 4096 positions"),
        (["--engine", "vlm"], "rollout.engine=vlm is not there"),
        (["rollout.sglang.max_runing_requests=3"], "did you mean rollout.sglang.max_running_requests?"),
        (["--model", "nothing"], "--model=nothing is no preset"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.json"
    assert main([*arguments, "--output", str(output)]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists() and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("engine", ["hf", pytest.param("sglang", marks=pytest.mark.slow)])
def test_a_real_engine_is_measured(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    assert main(["--quick", "--engine", engine, "--output", str(output)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    report = json.loads(output.read_text())
    assert report["environment"]["clock"] == "wall seconds" and report["dtype"] == "float32"
    ((label, case),) = report["cases"].items()
    row = case["details"]
    assert label.startswith(f"{engine} x 1") and case["figures"]["tokens/s"] == row["tokens_per_s"]
    assert report["columns"] == list(case["figures"]) and case["sizes"]["devices"] == 1
    assert (row["engine"], row["engines"], row["samples"], row["sequences"]) == (engine, 1, 4, 64)
    assert row["slots"] == (64 if engine == "hf" else 16)
    assert 64 <= row["response_tokens"] <= 64 * 64 and row["longest_response"] <= 64
    assert row["tokens_per_s"] > 0 and row["first_token_idle_s"] > 0 and row["first_token_s"] > 0
    assert 0 < row["utilisation"] <= 1 and 0 <= row["below_half_share"] <= 1
    assert len(row["rounds"]) == 1
