"""Real SGLang engines that are killed, stopped or lose their host in the middle of a run, which goes on.

The run is told of every fault; at its end no sequence of any step is missing or there twice, and every engine holds the
weights of the last step.
"""

import re
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from megappo.errors import INTERRUPTED
from tests.end_to_end.conftest import END_TIMEOUT_S, START_TIMEOUT_S, Launch, Run, assert_all_gone, command_line_of

QUIET = ("experiment=quickstart", "trainer.test_freq=-1", "trainer.val_before_train=false", "tracking.trackers=[]")
RECOVERY = ("rollout.recovery.health_interval_s=1", "rollout.recovery.hang_timeout_s=10")
SEQUENCES = 32 * 8
RECOVERY_TIMEOUT_S = 240


def named(run: Run, text: str) -> psutil.Process:
    """The oldest running process of a run whose command line contains a text, once there is one."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [process for process in run.descendants() if text in " ".join(command_line_of(process))]
        return bool(found)

    wait_until(run, is_there)
    return min(found, key=lambda process: process.pid)


def wait_for_log(run: Run, text: str) -> None:
    """Wait until the controller logs a text once more."""
    path = run.directory / "logs" / "controller.log"
    count = path.read_text().count(text)
    wait_until(run, lambda: path.read_text().count(text) > count)


def wait_until(run: Run, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while not happened():
        if time.monotonic() > deadline or run.process.poll() is not None:
            run.kill()
            pytest.fail(f"the run ended, or waited in vain\n{run.output}")
        time.sleep(0.02)


def times_told(run: Run, text: str) -> list[float]:
    """Seconds since the start of the run at which lines with a text were printed."""
    return [float(found) for found in re.findall(rf"\[ *([\d.]+) s\][^\n]*{text}", run.output)]


def check_steps(run: Run, *, restarts: int) -> None:
    """Every step trained on every sequence, and the restarts were counted."""
    lines = run.metrics()
    assert all(line["rollout/sequences"] == SEQUENCES for line in lines if "rollout/sequences" in line)
    assert sum(line.get("perf/engine_restarts", 0) for line in lines) == restarts
    assert [line["weights/version"] for line in lines if "weights/version" in line] == sorted(
        line["step"] for line in lines if "weights/version" in line
    )


@pytest.fixture(scope="module")
def recovered_run(launch: Launch, sft_run: Run) -> tuple[Run, list[psutil.Process]]:
    """A run whose only engine was killed while it generated, and that was ended by Ctrl-C two steps later; with the
    processes that it had then."""
    run = launch("train", "killed-engine", *QUIET, "tracking.trackers=[mlflow]")
    run.wait_for_step(1)
    wait_for_log(run, "wake_cache")
    named(run, "sglang::scheduler").kill()
    wait_until(run, lambda: "takes prompts again" in run.output)
    run.wait_for_step(max(line["step"] for line in run.metrics()) + 2)
    processes = run.descendants()
    run.interrupt()
    assert run.wait(END_TIMEOUT_S) == INTERRUPTED, run.output
    return run, processes


def test_the_only_engine_is_killed_while_it_generates_and_the_run_goes_on(
    recovered_run: tuple[Run, list[psutil.Process]],
) -> None:
    run, _ = recovered_run
    assert "rollout engine 0 (pid" in run.output
    assert "restart 1 of 3" in run.output and "takes prompts again" in run.output
    check_steps(run, restarts=1)
    # The log of the engine that died is kept beside that of the next one.
    assert {path.name for path in (run.directory / "logs").glob("engine-0*.log")} == {
        "engine-0.log",
        "engine-0-restart-1.log",
    }


def test_ctrl_c_ends_every_process_those_of_the_new_engine_too_and_says_what_was_saved(
    recovered_run: tuple[Run, list[psutil.Process]],
) -> None:
    run, processes = recovered_run
    assert_all_gone(processes)
    assert "interrupted after step" in run.output
    assert "no checkpoint (trainer.save_freq)" in run.output
    assert run.summary()["exit"] == "interrupted"


def kill_scheduler(run: Run) -> None:
    wait_for_log(run, "wake_cache")
    named(run, "sglang::scheduler").kill()


def stop_scheduler(run: Run) -> None:
    wait_for_log(run, "wake_cache")
    named(run, "sglang::scheduler").send_signal(signal.SIGSTOP)


def kill_host(run: Run) -> None:
    wait_for_log(run, "wake_cache")
    named(run, "ray::RolloutHost").kill()


def kill_while_it_receives(run: Run) -> None:
    """Stop the scheduler while the trainers train, so that the next hand-over waits for it; then kill it."""
    wait_for_log(run, "sleep")
    scheduler = named(run, "sglang::scheduler")
    scheduler.send_signal(signal.SIGSTOP)
    wait_for_log(run, "wake_weights")
    time.sleep(1.0)
    scheduler.kill()


FAULTS = {
    "killed while generating": kill_scheduler,
    "hung while generating": stop_scheduler,
    "host killed while generating": kill_host,
    "killed while receiving weights": kill_while_it_receives,
}


@pytest.mark.slow
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_run_survives_every_fault_one_after_the_other(launch: Launch, sft_run: Run, num_engines: int) -> None:
    name = f"faults-{num_engines}"
    run = launch(
        "train",
        name,
        *QUIET,
        *RECOVERY,
        f"rollout.num_engines={num_engines}",
        "rollout.recovery.max_restarts=20",
        "rollout.recovery.max_backoff_s=1",
        "trainer.total_steps=100000",
    )
    run.wait_for_step(2)
    table: list[str] = []
    for number, (fault, cause) in enumerate(FAULTS.items(), start=1):
        cause(run)
        start = time.monotonic()
        wait_until(run, lambda number=number: len(times_told(run, "; restart ")) >= number)
        found_s = time.monotonic() - start
        wait_until(run, lambda number=number: len(times_told(run, "takes prompts again")) >= number)
        table.append(f"{fault}: found after {found_s:.1f} s, back after {time.monotonic() - start:.1f} s")
        run.wait_for_step(max(line["step"] for line in run.metrics()) + 2)
    run.interrupt()
    assert run.wait(START_TIMEOUT_S) == 130, run.output
    print("\n".join([f"{num_engines} engine(s)", *table]))
    check_steps(run, restarts=len(FAULTS))


@pytest.mark.slow
def test_without_restarts_a_killed_engine_ends_the_run_with_who_where_and_its_last_lines(
    launch: Launch, sft_run: Run
) -> None:
    run = launch("train", "killed-for-good", *QUIET, "rollout.recovery.max_restarts=0")
    run.wait_for_step(2)
    processes = run.descendants()
    named(run, "sglang::scheduler").kill()
    assert run.wait(RECOVERY_TIMEOUT_S) == 1
    assert "rollout engine 0 (pid" in run.output
    assert "engine-0.log" in run.output
    assert "ended after step" in run.output
    assert run.summary()["exit"].startswith("failed")
    assert_all_gone(processes)
