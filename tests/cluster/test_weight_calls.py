"""What is told of calls that do not end in time."""

import time
from pathlib import Path

import pytest
import ray

from megappo.cluster import weight_calls
from megappo.cluster.runtime import Call
from megappo.cluster.weight_calls import settle


@ray.remote(num_cpus=0)
def answer_after(seconds: float, problem: str) -> None:
    time.sleep(seconds)
    if problem:
        raise ValueError(problem)


def test_a_late_call_is_told_how_long_it_was_waited_for(ray_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_calls, "_GRACE_S", 0.5)
    slow, failing = answer_after.remote(600.0, ""), answer_after.remote(0.0, "no ink")
    calls = [Call(ref=ref, worker=name, log_paths=(Path("none"),)) for ref, name in ((slow, "slow"), (failing, "bad"))]
    _, failures = settle(calls, [], phase="send", timeout_s=500.0)
    told = sorted(str(failure.error) for failure in failures)
    assert len(told) == 2
    assert "no ink" in told[0]
    assert "slow" in told[1] and "no answer within 0.5 s of the first failure" in told[1]
    _, failures = settle(calls[:1], [], phase="send", timeout_s=0.3)
    assert "no answer within 0.3 s" in str(failures[0].error) and "first failure" not in str(failures[0].error)
    ray.cancel(slow, force=True)
