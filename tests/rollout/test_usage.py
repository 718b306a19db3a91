"""The use of engines over a few seconds, by hand."""

import pytest

from megappo.observability.metrics import values
from megappo.rollout.usage import UsageMeter


def test_goodput_and_idle_shares_are_over_the_time_in_which_anything_is_generated() -> None:
    meter = UsageMeter()
    meter.observe(0.0, generating=False, engines=[0, 1], busy=[])
    meter.observe(10.0, generating=True, engines=[0, 1], busy=[0, 1])  # ten seconds of training do not count
    meter.observe(12.0, generating=True, engines=[0, 1], busy=[0])
    meter.observe(13.0, generating=True, engines=[0], busy=[0])  # engine 1 left
    meter.keep(300)
    meter.observe(14.0, generating=False, engines=[0], busy=[])
    metrics = values(meter.take(20.0))
    assert metrics["perf/goodput_tokens_per_s"] == pytest.approx(300 / 4)
    assert metrics["perf/engine_idle_share/0"] == 0.0
    assert metrics["perf/engine_idle_share/1"] == pytest.approx(1 / 3)  # idle 1 s of the 3 s that it was there
    assert metrics["perf/engine_idle_share/mean"] == pytest.approx(1 / 7)
    assert metrics["perf/engines"] == 1


def test_faults_are_counted_once_and_a_reading_starts_anew() -> None:
    meter = UsageMeter()
    meter.observe(0.0, generating=True, engines=[0], busy=[0])
    meter.count_retries(3)
    meter.count_moved(2)
    meter.count_restart()
    meter.recovered(4.0)
    meter.recovered(2.5)
    first, second = values(meter.take(1.0)), values(meter.take(2.0))
    names = ("perf/rollout_retries", "perf/groups_moved", "perf/engine_restarts")
    assert [first[name] for name in names] == [3, 2, 1] and first["timing/engine_recovery_s/max"] == 4.0
    assert [second[name] for name in names] == [0, 0, 0] and "timing/engine_recovery_s/max" not in second
    assert second["perf/goodput_tokens_per_s"] == 0.0
