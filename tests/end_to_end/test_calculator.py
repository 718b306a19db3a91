"""The tool example as docs/agents.md has it: the reward rises, and engine and trainer agree with tools' answers in
between."""

import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch

START = "runs/calculator-start"


@pytest.mark.slow
def test_the_model_learns_to_ask_the_calculator(launch: Launch) -> None:
    start = launch("sft", "calculator-start", "experiment=calculator_start", f"sft.output={START}", "sft.tracked=false")
    assert start.wait(2 * START_TIMEOUT_S) == 0, start.output
    run = launch("train", "calculator", "experiment=calculator", "trainer.total_steps=10", f"sft.output={START}")
    assert run.wait(2 * START_TIMEOUT_S) == 0, run.output
    steps = run.metrics()
    first, last = steps[0], steps[-1]
    assert first["reward/mean"] < 0.5 and last["reward/mean"] > first["reward/mean"] + 0.25
    assert last["rollout/agent/tool_calls/mean"] > first["rollout/agent/tool_calls/mean"] + 0.3
    assert last["rollout/observation_tokens/mean"] > 2
    assert max(step["actor/rollout_log_prob_diff/max"] for step in steps) <= 1e-4
