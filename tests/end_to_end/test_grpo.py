"""`megappo train` as the quickstart does it: Megatron tensor parallel 2, a real SGLang server, gloo hand-over."""

import json
import re
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from transformers import AutoConfig

from megappo.observability.metric_catalogue import undocumented
from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run, assert_all_gone

STEPS = 4


@pytest.fixture(scope="module")
def grpo_run(launch: Launch, sft_run: Run) -> Run:
    """A finished GRPO run of a few steps, with validation."""
    run = launch(
        "train",
        "grpo",
        "experiment=quickstart",
        f"trainer.total_steps={STEPS}",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
        "data.validation.size=5540",
    )
    run.wait_for_step(1)
    processes = run.descendants()
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    assert_all_gone(processes)
    return run


def test_the_summary_tells_what_the_run_did(grpo_run: Run) -> None:
    summary = grpo_run.summary()
    assert set(summary) >= {"steps", "wall_s", "reward_first_10", "reward_last_10", "exit"}
    assert (summary["steps"], summary["weight_version"], summary["exit"]) == (STEPS, STEPS, "completed")


def test_rollout_and_training_log_probs_agree_in_fp32(grpo_run: Run) -> None:
    assert 0 < grpo_run.summary()["log_prob_diff_first_step_max"] <= 1e-4
    # After every hand-over, too: stale or wrong weights would show here.
    differences = [line["actor/rollout_log_prob_diff/max"] for line in grpo_run.metrics()]
    assert len(differences) == STEPS
    assert max(differences) <= 1e-4


def test_rollouts_carry_the_version_of_the_hand_over_before_them(grpo_run: Run) -> None:
    versions = [line["rollout/policy_version/min"] for line in grpo_run.metrics()]
    assert versions == list(range(STEPS))


def test_every_metric_is_documented(grpo_run: Run) -> None:
    names = {name for line in grpo_run.metrics() for name in line if name != "step"}
    assert not undocumented(sorted(names))


def test_validation_ran_before_during_and_after(grpo_run: Run) -> None:
    assert [line["step"] for line in grpo_run.metrics() if "val/reward/mean" in line] == [2, 4]
    summary = grpo_run.summary()
    assert summary["val_reward_last"] == grpo_run.metrics()[-1]["val/reward/mean"]
    assert 0 <= summary["val_reward_first"] <= 1


def test_metrics_have_one_line_per_step(grpo_run: Run) -> None:
    assert [line["step"] for line in grpo_run.metrics()] == list(range(1, STEPS + 1))


def test_no_key_of_a_server_is_written(grpo_run: Run) -> None:
    folder = grpo_run.directory
    written = [folder / name for name in ("config.yaml", "metrics.jsonl", "summary.json")]
    written += [path for part in ("logs", "rollouts") for path in (folder / part).iterdir()]
    texts = {path.name: path.read_text(errors="replace") for path in written} | {"output": grpo_run.output}
    assert "engine-0.log" in texts
    # secrets.token_hex(16); ids of Ray's processes end with zeros
    keys = re.compile(r"(?<![0-9a-f])[0-9a-f]{26}(?!000000)[0-9a-f]{6}(?![0-9a-f])")
    assert {name: keys.findall(text) for name, text in texts.items() if keys.search(text)} == {}


def test_the_run_directory_is_complete(grpo_run: Run) -> None:
    folder = grpo_run.directory
    assert (folder / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "samples_per_prompt: 8" in (folder / "config.yaml").read_text()
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert logs >= {"actor-0.log", "actor-1.log", "engine-0.log", "rollout-0.log", "reward-0.log"}
    samples = [json.loads(line) for line in (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples:
        correct = sample["response"] == sample["answer"] and sample["finish_reason"] == "stop"
        assert sample["score"] == float(correct)


def test_mlflow_has_the_metrics_and_the_files(grpo_run: Run) -> None:
    client = MlflowClient(tracking_uri=f"sqlite:///{grpo_run.directory / 'mlflow.db'}")
    (experiment,) = [found for found in client.search_experiments() if found.name == "megappo"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    rewards = [line["reward/mean"] for line in grpo_run.metrics()]
    assert [point.value for point in history] == rewards
    assert {"config.yaml", "reward_curve.png"} <= {file.path for file in client.list_artifacts(run.info.run_id)}


def test_a_person_reads_phases_steps_answers_and_what_to_do_next(grpo_run: Run) -> None:
    output = grpo_run.output
    for text in ("starting Ray", "engine(s)", f"step {STEPS}/{STEPS}", "before", "after", "mlflow ui", "Next"):
        assert text in output, text
    assert "generate" in output and "hand-over" in output


def test_the_model_folder_is_untouched_by_training(grpo_run: Run, workspace: Path) -> None:
    assert AutoConfig.from_pretrained(workspace / "runs/quickstart-sft/model").model_type == "qwen2"
