"""Learning-rate schedules at hand-computed steps (steps count from 1)."""

import math

import pytest

from megappo.config.optim import DecayShape, OptimConfig, ScheduleKind
from megappo.train.schedule import learning_rate_at


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ScheduleKind.constant, {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 8: 1.0, 100: 1.0}),
        (ScheduleKind.linear, {1: 0.25, 3: 0.75, 4: 1.0, 6: 0.8, 8: 0.6, 9: 0.5, 10: 0.4, 14: 0.0, 100: 0.0}),
        (ScheduleKind.cosine, {1: 0.25, 4: 1.0, 9: 0.5, 14: 0.0, 100: 0.0}),
    ],
)
def test_rate_rises_to_its_peak_and_falls_to_the_minimum(kind: ScheduleKind, expected: dict[int, float]) -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule=kind, decay_steps=14)
    for step, rate in expected.items():
        assert learning_rate_at(config, step) == pytest.approx(rate, abs=1e-12), step


def test_without_warmup_the_first_step_has_the_peak_rate_and_the_last_the_minimum() -> None:
    config = OptimConfig(lr=2.0, min_lr=0.5, schedule=ScheduleKind.linear, decay_steps=4)
    assert [learning_rate_at(config, step) for step in (1, 2, 3, 4, 5)] == [2.0, 1.5, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [
        (DecayShape.linear, 0.75, 0.5),
        (DecayShape.cosine, 0.5 + 0.25 * math.sqrt(2), 0.5),
        (DecayShape.exponential, 2**0.75 - 1, math.sqrt(2) - 1),
        (DecayShape.minus_sqrt, 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_holds_the_peak_and_falls_over_the_last_steps(shape: DecayShape, quarter: float, half: float) -> None:
    config = OptimConfig(
        lr=3.0,
        min_lr=1.0,
        warmup_steps=2,
        schedule=ScheduleKind.wsd,
        decay_steps=20,
        final_decay_steps=8,
        final_decay_shape=shape,
    )
    expected = {1: 1.5, 2: 3.0, 7: 3.0, 12: 3.0, 14: 1 + 2 * quarter, 16: 1 + 2 * half, 20: 1.0, 21: 1.0}
    for step, rate in expected.items():
        assert learning_rate_at(config, step) == pytest.approx(rate, abs=1e-12), step


def test_wsd_without_a_stable_part_falls_from_the_end_of_the_warmup() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule=ScheduleKind.wsd, decay_steps=6, final_decay_steps=4)
    assert [learning_rate_at(config, step) for step in range(1, 8)] == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
