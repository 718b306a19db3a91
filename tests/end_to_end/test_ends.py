"""How a run ends that does not end well: an engine cannot start, a worker dies, someone presses Ctrl-C early.

Ctrl-C in the middle of a run is pressed in test_engine_faults.py.
"""

import time

import psutil
import pytest

from tests.end_to_end.conftest import END_TIMEOUT_S, Launch, Run, assert_all_gone, command_line_of

LONG = ("experiment=quickstart", "trainer.test_freq=-1", "trainer.val_before_train=false", "tracking.trackers=[]")


def named(processes: list[psutil.Process], text: str) -> list[psutil.Process]:
    """Running processes whose command line contains a text."""
    return [process for process in processes if text in " ".join(command_line_of(process))]


@pytest.mark.slow
def test_a_run_that_is_terminated_ends_every_process_and_says_what_was_saved(launch: Launch, sft_run: Run) -> None:
    run = launch("train", "terminated", *LONG, "tracking.trackers=[mlflow]")
    run.wait_for_step(1)
    processes = run.descendants()
    run.process.terminate()
    assert run.wait(END_TIMEOUT_S) == 130, run.output
    assert "interrupted after step" in run.output
    assert "no checkpoint (trainer.save_freq)" in run.output
    assert run.summary()["exit"] == "interrupted"
    assert_all_gone(processes)


@pytest.mark.slow
def test_ctrl_c_while_everything_starts_ends_every_process(launch: Launch, sft_run: Run) -> None:
    run = launch("train", "interrupted-early", *LONG)
    deadline = time.monotonic() + 120
    while "starting the actor" not in run.output and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2.0)
    processes = run.descendants()
    run.interrupt()
    assert run.wait(END_TIMEOUT_S) == 130, run.output
    assert "interrupted after step 0" in run.output
    assert_all_gone(processes)


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(launch: Launch, sft_run: Run) -> None:
    run = launch("train", "no-start", *LONG, "rollout.sglang.attention_backend=nonsense")
    assert run.wait(240) == 1
    assert "rollout engine 0" in run.output and "nonsense" in run.output


@pytest.mark.slow
def test_a_training_worker_that_is_killed_ends_the_run_with_its_name(launch: Launch, sft_run: Run) -> None:
    run = launch("train", "killed-worker", *LONG, "rollout=hf")
    run.wait_for_step(1)
    processes = run.descendants()
    workers = named(processes, "ray::ActorWorker")
    assert len(workers) == 2
    workers[1].kill()
    assert run.wait(90) == 1
    assert "actor rank" in run.output and "its process died" in run.output
    assert_all_gone(processes)
