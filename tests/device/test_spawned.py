"""Processes that a command starts for itself."""

import re
import signal
from functools import partial
from pathlib import Path

import pytest

from megappo.device.spawned import run_spawned
from megappo.errors import CheckpointError, WorkerError
from tests.device.spawned_jobs import die, fail, refuse, square


def test_results_come_in_the_order_of_the_ranks_which_share_a_port() -> None:
    (first, port), (second, other) = run_spawned(square, 2)
    assert (first, second) == (0, 1) and port == other > 0


def test_what_one_refuses_ends_all_with_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"^no such folder$"):
        run_spawned(refuse, 2)
    assert capfd.readouterr().out == "rank 1 was here\n"


def test_what_nobody_foresaw_is_told_with_its_traceback_and_the_log(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"(?s)process 0 failed:.*Error: what is this.*the last line of the log"):
        run_spawned(fail, 1, logs=[tmp_path / "0.log"])


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "process 1 was ended by SIGKILL: the machine may have run out of memory (use one with more"),
        (signal.SIGSEGV, "process 1 was ended by SIGSEGV"),
    ],
)
def test_a_process_that_is_killed_is_told_of_by_signal_before_what_the_others_say(
    number: signal.Signals, message: str
) -> None:
    with pytest.raises(WorkerError, match=re.escape(message)) as caught:
        run_spawned(partial(die, int(number)), 2)
    assert caught.value.exit_code == 1
