"""A run that loses a worker, and then its driver, comes back by itself and is bitwise the run that lost nothing."""

import psutil
import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run, assert_all_gone, command_line_of
from tests.end_to_end.test_resume import assert_same


def find(run: Run, text: str) -> psutil.Process:
    found = [process for process in run.descendants() if text in " ".join(command_line_of(process))]
    return found[0]


@pytest.mark.slow
def test_a_run_that_loses_a_worker_and_its_driver_comes_back_by_itself(
    launch: Launch, ppo_run: Run, ppo_overrides: list[str]
) -> None:
    run = launch("train", "ppo-restarted", *ppo_overrides, "trainer.save_freq=1", "restart.max=1", "restart.wait_s=0")
    run.wait_for_step(1)
    find(run, "ray::ActorWorker").kill()
    run.wait_for_step(2)
    find(run, "megappo train").kill()
    processes = run.descendants()
    assert run.wait(2 * START_TIMEOUT_S) == 0, run.output
    assert "failed: WorkerError; restart 1 of at most 1 in a row, from the checkpoint of step 1" in run.output
    assert (
        "the driver was killed by SIGKILL; restart 1 of at most 1 in a row, from the checkpoint of step 2" in run.output
    )
    assert [line["perf/restarts"] for line in run.metrics()] == [0, 1, 2]
    assert_same(run, ppo_run)
    assert_all_gone(processes, timeout_s=60.0)
