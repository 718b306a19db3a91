"""How a run ends that does not end well: an engine cannot start, a worker dies, someone presses Ctrl-C.

A run that does not end within END_TIMEOUT_S hangs; how fast it ends depends on the load of the machine.
"""

import time

import psutil
import pytest

from tests.end_to_end.conftest import Launch, Run, assert_all_gone, command_line_of

END_TIMEOUT_S = 90
LONG = ("experiment=quickstart", "trainer.test_freq=-1", "trainer.val_before_train=false", "tracking.mlflow=false")


def named(processes: list[psutil.Process], text: str) -> list[psutil.Process]:
    """Running processes whose command line contains a text."""
    return [process for process in processes if text in " ".join(command_line_of(process))]


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("sigterm", marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_every_process_and_says_what_was_saved(how: str, launch: Launch, sft_run: Run) -> None:
    run = launch("train", f"interrupted-{how}", *LONG, "tracking.mlflow=true")
    run.wait_for_step(1)
    processes = run.descendants()
    if how == "ctrl-c":
        run.interrupt()
    else:
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
