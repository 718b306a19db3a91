"""Learning-rate schedules at hand-computed steps (steps count from 1)."""

import pytest

from megappo.config.optim import OptimConfig, ScheduleKind
from megappo.train.optimizer import learning_rate_at


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
