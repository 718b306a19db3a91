"""What a user reads when a worker process raises, dies or stops answering. Real Ray processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from megappo.cluster.runtime import Call, gather
from megappo.errors import CheckpointError, EngineError, WorkerError
from megappo.observability.logging import redirect_process_output
from tests.cluster.conftest import NO_WAIT, FirstTry


@ray.remote
class Worker:
    def __init__(self, log_path: Path) -> None:
        redirect_process_output(log_path)

    def answer(self, value: int) -> int:
        return value

    def print_and_die(self) -> None:
        print("about to die of signal 9")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_connection(self) -> None:
        raise RuntimeError("Connection closed by peer")

    def refuse(self) -> None:
        raise CheckpointError("folder x has no y")

    def raise_error(self) -> None:
        raise ValueError("seven is not eight")

    def hang(self) -> None:
        time.sleep(60)


@pytest.fixture(scope="module", autouse=True)
def running(ray_here: None) -> None:
    """Ray, for every test."""


def test_ray_is_started_once_more_when_it_does_not_come_up(first_try: FirstTry) -> None:
    assert first_try.heard.startswith("Ray did not start, trying once more: Timed out waiting")
    assert ray.is_initialized()


def make_call(tmp_path: Path, index: int, method: str, *args: object, name: str = "actor rank") -> Call:
    log_path = tmp_path / f"worker-{index}.log"
    worker = Worker.options(num_cpus=0).remote(log_path)
    return Call(ref=getattr(worker, method).remote(*args), worker=f"{name} {index}", log_paths=(log_path,))


def test_results_come_in_the_order_of_the_calls(tmp_path: Path) -> None:
    calls = [make_call(tmp_path, index, "answer", index * 10) for index in range(3)]
    assert gather(calls, phase="update", timeout_s=60) == [0, 10, 20]


def test_a_killed_worker_is_named_before_the_peers_it_disconnects_with_its_last_lines(tmp_path: Path) -> None:
    calls = [make_call(tmp_path, 0, "lose_connection"), make_call(tmp_path, 1, "print_and_die")]
    with pytest.raises(WorkerError, match=r"actor rank 1 failed in update: its process died") as caught:
        gather(calls, phase="update", timeout_s=60)
    assert "about to die of signal 9" in str(caught.value)


def test_a_dead_engine_host_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="rollout engine 0 failed in generate"):
        gather([make_call(tmp_path, 0, "print_and_die", name="rollout engine")], phase="generate", timeout_s=60)


def test_an_error_raised_on_purpose_keeps_its_class_and_gains_the_worker(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"actor rank 0, save: folder x has no y"):
        gather([make_call(tmp_path, 0, "refuse")], phase="save", timeout_s=60)


def test_any_other_error_is_told_with_its_class_and_text(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"actor rank 0 failed in update: raised ValueError: seven is not eight"):
        gather([make_call(tmp_path, 0, "raise_error")], phase="update", timeout_s=60)


def test_a_worker_that_does_not_answer_is_named_with_the_deadline(tmp_path: Path) -> None:
    calls = [make_call(tmp_path, 0, "answer", 1), make_call(tmp_path, 1, "hang")]
    gather(calls[:1], phase="start", timeout_s=60)
    with pytest.raises(WorkerError, match=r"^actor rank 1: no answer in log-probs within 1 s"):
        gather(calls, phase="log-probs", timeout_s=1)


FAILING_START = """
import psutil
from megappo.cluster.runtime import start_ray
from megappo.config.cluster import ClusterConfig
from megappo.errors import WorkerError

try:
    start_ray(ClusterConfig(), num_cpus=1)
except WorkerError as error:
    print(error)
print("left:", [process.name() for process in psutil.Process().children(recursive=True)])
"""


def test_a_ray_that_never_starts_is_told_in_words_and_leaves_no_process() -> None:
    environment = os.environ | {NO_WAIT: "0"}
    done = subprocess.run([sys.executable, "-c", FAILING_START], env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Ray did not start on this machine, nor at a second try: Timed out" in done.stdout
    assert done.stdout.endswith("left: []\n")
