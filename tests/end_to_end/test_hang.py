"""A run of which one rank is stopped ends by itself, names the rank, and leaves nothing running."""

import os
import signal
import time

import pytest

from megappo.observability.board import read_board
from tests.end_to_end.conftest import END_TIMEOUT_S, Launch, assert_all_gone

pytestmark = pytest.mark.slow

LIMIT_S = 20


def test_a_stopped_rank_ends_the_run_with_its_name_and_a_report_is_written_when_asked_for(launch: Launch) -> None:
    run = launch(
        "sft",
        "x",
        "experiment=quickstart",
        "sft.output=runs/stopped",
        "sft.max_steps=100000",
        "cluster.pools.main=2",
        f"cluster.call_timeout_s={LIMIT_S}",
    )
    run.directory = run.directory.with_name("stopped")
    run.wait_for_step(3)
    logs = run.directory / "logs"
    os.kill(run.process.pid, signal.SIGUSR2)
    deadline = time.monotonic() + END_TIMEOUT_S
    while not (logs / "hang_1.txt").exists():
        assert time.monotonic() < deadline, run.output
        time.sleep(0.2)
    before = run.metrics()[-1]["step"]
    run.wait_for_step(before + 2)
    board = read_board(logs / "actor-1.status")
    assert board is not None
    started = run.descendants()
    os.kill(board.owner.pid, signal.SIGSTOP)
    assert run.wait(LIMIT_S + END_TIMEOUT_S) == 1, run.output
    named = f"actor rank 1 (pid {board.owner.pid})"
    assert f"no answer in update within {LIMIT_S} s (cluster.call_timeout_s); probably to blame: {named}" in run.output
    assert "stopped (SIGSTOP, or a debugger)" in run.output
    report = (logs / "hang_2.txt").read_text()
    assert f"probably to blame: {named}" in report
    assert "== actor rank 0 (pid " in report
    assert_all_gone(started)
    assert not list(logs.glob("*.status"))
