"""The benchmark of the controller: what its clock counts, and a loop over its fakes. Nothing asserts a time."""

import time

import pytest

from benchmarks.control.fakes import DEALING, READING, SENDING
from benchmarks.control.part_clock import PartClock
from benchmarks.controller import draw_size, make_grpo, make_ppo, measure_steps
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig
from megappo.config.batching import BatchingConfig
from megappo.config.run import RunConfig
from megappo.config.trainer import TrainerConfig


def test_the_clock_gives_time_to_the_part_that_ended_and_skips_gaps() -> None:
    clock = PartClock()
    _burn(0.02)
    clock.end("schedule")
    _burn(0.2)
    clock.skip()
    _burn(0.02)
    clock.end("schedule")
    clock.end("metrics")
    parts = clock.take()
    # The gap is ten times as long as a part.
    assert 0.04 <= parts["schedule"] < 0.2 and 0 <= parts["metrics"] < 0.02
    assert clock.take() == {}


def _burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_loop_over_the_fakes_tells_its_parts_for_every_step_but_the_first(estimator: str) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(advantage=AdvantageConfig(name=estimator)),
        batching=BatchingConfig(prompts_per_step=8, mini_batch_prompts=4, micro_batch_tokens=20000),
        trainer=TrainerConfig(total_steps=3),
    )
    steps = measure_steps(config, draw_size(8, engines=2), ranks=4)
    assert len(steps) == 2
    expected = {DEALING, READING, SENDING, "draw", "collect groups", "schedule", "plan the passes", "advantages"}
    assert all(expected <= step.keys() and all(value >= 0 for value in step.values()) for step in steps)


def test_the_step_that_it_is_held_against_is_told_with_its_source() -> None:
    for make in (make_grpo, make_ppo):
        case = make(False)
        sizes = case.sizes
        tokens = int(str(sizes["tokens"]))
        assert sizes["sequences"] == 32768
        assert str(sizes["step"]).startswith(f"{tokens / (512 * 1102):.0f} s: all tokens at 1102 tokens/s")
