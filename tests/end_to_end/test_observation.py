"""A run that is traced and profiled: what its processes tell of a step."""

import gzip
import json
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.observability.metric_catalogue import undocumented
from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def observed_run(launch: Launch, ppo_overrides: list[str]) -> Run:
    """Three steps of PPO, the second of which is traced and the third profiled."""
    run = launch(
        "train",
        "observed",
        *ppo_overrides,
        "trace.steps=[2]",
        "profile.steps=[3]",
        "profile.phases=[log_probs,values,update,weights,generate]",
        "tracking.trackers=[tensorboard]",
    )
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    return run


def events_of(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The phases of the traced step, by process."""
    trace = json.loads((run.directory / "traces" / "step_000002.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event)
    return found


def test_the_trace_of_a_step_holds_the_phases_of_all_processes_in_their_order(observed_run: Run) -> None:
    processes = events_of(observed_run)
    assert set(processes) == {"controller", "engine_0", "reward_0", "actor_0", "actor_1", "critic_0", "critic_1"}
    phases = {name: {event["name"] for event in events} for name, events in processes.items()}
    assert phases["controller"] >= {"step", "generate", "log_probs", "values", "update_actor", "weight_sync"}
    for rank in ("actor_0", "actor_1"):
        assert phases[rank] >= {"log_probs", "update", "mini_batch", "forward", "optimizer_step", "weights"}
    assert phases["critic_0"] >= {"values", "update"}
    assert phases["engine_0"] >= {"requests", "generate", "load_weights", "end_weights"}
    assert "rewards" in phases["reward_0"]
    (outer,) = [event for event in processes["controller"] if event["name"] == "update_actor"]
    (inner,) = [event for event in processes["actor_0"] if event["name"] == "update"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"], "one clock"
    assert len(list((observed_run.directory / "traces").iterdir())) == 1


def test_busy_shares_are_metrics_of_the_traced_step_and_a_table_at_the_end(observed_run: Run) -> None:
    shares = [
        {name: value for name, value in line.items() if name.startswith("perf/busy_share/")}
        for line in observed_run.metrics()
    ]
    assert shares[0] == shares[2] == {} and len(shares[1]) == 6
    assert all(0 < value <= 1 for name, value in shares[1].items() if "reward" not in name)
    assert "Busy, of the steps that were traced" in observed_run.output
    assert not undocumented([name for line in observed_run.metrics() for name in line if name != "step"])


def test_the_phases_of_the_chosen_ranks_are_profiled(observed_run: Run) -> None:
    names = {path.name for path in (observed_run.directory / "profiles").iterdir()}
    expected = {"log_probs-actor-0", "log_probs-2-actor-0", "update-actor-0", "values-critic-0", "update-critic-0"}
    expected |= {"generate-engine-0"}
    assert names >= {f"step_000003-{name}.json.gz" for name in expected}
    assert not any("-1.json" in name for name in names), "rank 1 was not asked for"
    with gzip.open(observed_run.directory / "profiles/step_000003-update-actor-0.json.gz", "rt") as file:
        found = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "mini_batch", "optimizer_step"} <= found


def test_tensorboard_has_the_numbers_of_every_step(observed_run: Run) -> None:
    read = EventAccumulator(str(observed_run.directory / "tensorboard")).Reload()
    rewards = [point.value for point in read.Scalars("reward/mean")]
    assert rewards == pytest.approx([line["reward/mean"] for line in observed_run.metrics()])
