"""`megappo sft` on real Ray and real Megatron, tensor parallel 2: its result, and a run that is killed and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.observability.metric_catalogue import MEASURED
from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run, assert_all_gone


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what is measured by the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def test_the_loss_falls_and_the_result_is_a_hugging_face_folder_wherever_the_run_is_named(
    sft_run: Run, workspace: Path
) -> None:
    folder = workspace / "runs" / "quickstart-sft"
    losses = [line["sft/loss"] for line in lines_of(folder)]
    assert len(losses) == 25
    assert losses[-1] < losses[0] - 1
    assert json.loads((folder / "summary.json").read_text())["exit"] == "completed"
    assert "megappo train ... model.path=runs/quickstart-sft/model" in sft_run.output
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert 0.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompt = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) == "abc>"


@pytest.mark.slow
def test_killed_and_resumed_gives_bitwise_the_same_metrics_and_weights(
    launch: Launch, sft_run: Run, workspace: Path
) -> None:
    overrides = ["experiment=quickstart", "sft.max_steps=25", "sft.output=runs/killed", "sft.save_freq=10"]
    first = launch("sft", "killed", *overrides)
    first.wait_for_step(13)
    processes = first.descendants()
    first.kill()
    first.process.wait(10)
    assert_all_gone(processes)
    second = launch("sft", "killed", *overrides, "resume=auto")
    assert second.wait(START_TIMEOUT_S) == 0, second.output
    assert "resuming from" in second.output
    whole = workspace / "runs" / "quickstart-sft"
    assert lines_of(second.directory) == lines_of(whole)
    weights = "model/model.safetensors"
    assert (second.directory / weights).read_bytes() == (whole / weights).read_bytes()
