"""Runs in real processes that are killed, resumed, and then are bitwise the run that nobody killed."""

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

from megappo.checkpoint.health import Checksums, check, newest_whole
from megappo.config.checkpoint import OnDamaged
from megappo.observability.metric_catalogue import MEASURED
from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run, command_line_of
from tests.end_to_end.killed import MOMENTS

KILLED = -9
"""Exit status of a process that SIGKILL ended."""


def numbers(run: Run) -> list[dict[str, Any]]:
    """All metrics but those of time."""
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in run.metrics()]


def weights(run: Run) -> dict[str, bytes]:
    """The files of the last exported model."""
    folder = sorted((run.directory / "hf").iterdir())[-1]
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def assert_same(run: Run, expected: Run) -> None:
    for mine, theirs in zip(numbers(run), numbers(expected), strict=True):
        assert mine == theirs, f"step {theirs['step']}"
    assert weights(run) == weights(expected)


def assert_no_worker_is_left(processes: set[psutil.Process]) -> None:
    """Nothing holds a model or a port any more; Ray's own agents notice a minute later that their node is gone."""

    def alive() -> list[str]:
        lines = [" ".join(command_line_of(process)) for process in processes]
        return [line for line in lines if "raylet" in line or re.search("ray::.*(Worker|Host)", line)]

    deadline = time.monotonic() + 60.0
    while alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive()


def test_a_run_whose_driver_is_killed_while_it_saves_goes_on_bitwise(
    launch: Launch, ppo_run: Run, ppo_overrides: list[str]
) -> None:
    saving = [*ppo_overrides, "trainer.save_freq=1"]
    run = launch("train", "ppo-killed", *saving, killed=["save: before the rename", "2"])
    processes = set(run.descendants())
    deadline = time.monotonic() + START_TIMEOUT_S
    while run.process.poll() is None and time.monotonic() < deadline:
        processes.update(run.descendants())
        time.sleep(0.2)
    assert run.wait(1) == KILLED, run.output
    assert [line["step"] for line in run.metrics()] == [1], "step 2 was being saved"
    run = launch("train", "ppo-killed", *saving, "resume=auto")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    assert "step_000002.writing, which a run that was killed left unfinished" in run.output
    assert "resuming from" in run.output and "step_000001" in run.output
    assert_same(run, ppo_run)
    assert_no_worker_is_left(processes)
    checkpoints = run.directory / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step_000003"
    assert check(checkpoints / "step_000003", Checksums.full).is_whole
    client = MlflowClient(tracking_uri=f"sqlite:///{run.directory / 'mlflow.db'}")
    (experiment,) = [found for found in client.search_experiments() if found.name == "megappo"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    history = {point.step: point.value for point in client.get_metric_history(tracked.info.run_id, "reward/mean")}
    assert history == {line["step"]: line["reward/mean"] for line in run.metrics()}


@pytest.mark.slow
def test_a_finished_run_says_so_and_starts_nothing(launch: Launch, ppo_run: Run, ppo_overrides: list[str]) -> None:
    before = ppo_run.metrics()
    run = launch("train", "ppo", *ppo_overrides, "trainer.save_freq=2", "resume=auto")
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    assert "all steps are done already" in run.output and "starting Ray" not in run.output
    assert run.metrics() == before
    assert run.summary()["exit"] == "completed" and run.summary()["steps"] == 3


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_is_refused_by_name_before_anything_starts(
    launch: Launch, ppo_run: Run, ppo_overrides: list[str]
) -> None:
    before = ppo_run.metrics()
    run = launch("train", "ppo", *ppo_overrides, "resume=auto", "seed=7", "actor.optim.lr=1e-5")
    assert run.wait(START_TIMEOUT_S) == 2, run.output
    assert "config error: seed=7 does not fit the checkpoint" in run.output
    assert "actor.optim.lr" not in run.output and "starting Ray" not in run.output
    assert run.metrics() == before and run.summary()["steps"] == 3, "as it was"


LONG = 30
CALLS = {
    "generation": 2,
    "generation, engine": 2,
    "log-probs": 4,
    "update": 2,
    "update, rank": 2,
    "hand-over": 2,
    "save: before the pointer moves": 3,
    "save: files of the ranks": 3,
    "save: files of the ranks, rank": 3,
    "save: asynchronous": 4,
    "before the line of the step": 2,
}
"""Which call is fatal, where it is not the second: others are of another role, of the start, or another file."""


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_run_that_is_killed_at_every_moment_is_bitwise_the_run_that_was_not(
    launch: Launch, ppo_overrides: list[str], workspace: Path
) -> None:
    saving = [*ppo_overrides, f"trainer.total_steps={LONG}", "trainer.export_hf_freq=100", "tracking.trackers=[]"]
    saving.append("trainer.save_freq=1")
    whole = launch("train", "whole", *saving)
    assert whole.wait(4 * START_TIMEOUT_S) == 0, whole.output
    expected, table = numbers(whole), list[str]()
    for moment in MOMENTS:
        asynchronous = f"checkpoint.asynchronous={str(moment.endswith('asynchronous')).lower()}"
        fatal = [moment, str(CALLS.get(moment, 2))]
        run = launch("train", "killed", *saving, asynchronous, "resume=auto", killed=fatal)
        code = run.wait(2 * START_TIMEOUT_S)
        found = newest_whole(run.directory / "checkpoints", OnDamaged.previous)
        checkpoint = "none" if found is None else found.folder.name
        told = len(numbers(run))
        table.append(f"{moment:34} exit {code:4}  steps told {told:2}  newest whole checkpoint {checkpoint}")
        (workspace / "kill-points.txt").write_text("\n".join(table) + "\n")
        assert numbers(run) == expected[:told], table
        survives = MOMENTS[moment].victim == "ray::RolloutHost"
        assert code == (0 if survives else KILLED if MOMENTS[moment].victim == "driver" else 1), run.output
        if survives:
            (run.directory).rename(run.directory.with_name("survived"))
            assert told == LONG
    run = launch("train", "killed", *saving, "resume=auto")
    assert run.wait(4 * START_TIMEOUT_S) == 0, run.output
    assert_same(run, whole)
