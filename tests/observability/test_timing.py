"""Phase timers, with a clock of the test's own."""

import pytest

from megappo.observability.metrics import values
from megappo.observability.timing import PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_phases_nest_and_add_up(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("step"):
        for _ in range(2):
            with timer.phase("generate"):
                clock[0] += 1.5
        clock[0] += 0.25
    assert values(timer.metrics()) == {"timing/generate_s": 3.0, "timing/step_s": 3.25}
    assert timer.seconds("never") == 0.0


def test_a_phase_that_raises_counts(clock: list[float]) -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="stop"), timer.phase("generate"):
        clock[0] += 2.0
        raise ValueError("stop")
    assert timer.seconds("generate") == 2.0


def test_what_is_called_before_a_phase_can_end_it_before_it_begins(clock: list[float]) -> None:
    begun: list[int] = []

    def check() -> None:
        if len(begun) == 1:
            raise ValueError("failed meanwhile")

    timer = PhaseTimer(check)
    with timer.phase("log_probs"):
        begun.append(1)
    with pytest.raises(ValueError, match="failed meanwhile"), timer.phase("update_actor"):
        begun.append(2)
    assert begun == [1] and "timing/update_actor_s" not in timer.metrics()
