"""Every algorithm preset trains the quickstart task for 20 steps on real parts without a non-finite number."""

import math
from pathlib import Path

import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "algorithm").glob("*.yaml"))
MORE = {"gdpo": ["algorithm.advantage.reward_keys=[correct]", "algorithm.advantage.weights=[1.0]"]}
"""Keys that a preset leaves to the task."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_twenty_steps(preset: str, launch: Launch, sft_run: Run) -> None:
    run = launch(
        "train",
        f"preset-{preset}",
        "experiment=quickstart",
        f"algorithm={preset}",
        "rollout=hf",
        "cluster.pools.main=1",
        "actor.parallelism.tensor=1",
        "trainer.total_steps=20",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "tracking.trackers=[]",
        *MORE.get(preset, []),
    )
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    lines = run.metrics()
    assert len(lines) == 20
    broken = {name for line in lines for name, value in line.items() if not math.isfinite(float(value))}
    assert not broken
    # A step whose groups carry no signal (dynamic sampling after so short a start) updates nothing; some must.
    updates = [line for line in lines if "actor/skipped_steps" in line]
    assert updates and max(line["actor/skipped_steps"] for line in updates) == 0
