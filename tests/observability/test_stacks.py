"""Stacks of real processes that do not help: one that keeps Python's lock, one that is stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megappo.observability import stacks
from megappo.observability.processes import look
from megappo.observability.stacks import read_stacks

# ctypes.PyDLL keeps the lock while it calls: no Python thread of the process runs meanwhile.
PROGRAM = """
import ctypes, pathlib, sys
from megappo.observability.board import Owner, open_board
from megappo.observability.logging import redirect_process_output
from megappo.observability.phases import phase
from megappo.observability.stacks import show_stacks_on_signal

def hang_with_the_lock():
    ctypes.PyDLL(None).sleep(600)

path = pathlib.Path(sys.argv[1])
redirect_process_output(path)
show_stacks_on_signal()
open_board(path.with_suffix(".status"), Owner(name="actor rank 1", role="actor", rank=1))
with phase("update"):
    print("ready", flush=True)
    hang_with_the_lock()
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A process that hangs in C code with Python's lock, and its log."""
    log = tmp_path / "actor-1.log"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(log)])
    try:
        deadline = time.monotonic() + 60.0
        while not log.exists() or "ready" not in log.read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        yield process.pid, log
    finally:
        process.kill()
        process.wait()


def without_py_spy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put a py-spy first that says what the real one says where ptrace is refused."""
    refusing = folder / "py-spy"
    refusing.write_text(
        "#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setattr(stacks.sys, "executable", str(folder / "python"))


def test_a_process_that_keeps_the_lock_is_read_from_outside_and_by_signal(
    hanging: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, log = hanging
    found = read_stacks(pid, log_path=log, limit_s=20.0)
    told = found.how == "py-spy" or found.how.startswith("faulthandler")
    assert told, found.how
    assert any("hang_with_the_lock" in line for line in found.lines)
    without_py_spy(monkeypatch, tmp_path)
    found = read_stacks(pid, log_path=log, limit_s=20.0)
    assert found.how == (
        "faulthandler, by SIGUSR2 (py-spy: Permission Denied: Try running again with elevated permissions)"
    )
    assert any("hang_with_the_lock" in line for line in found.lines)
    assert psutil.pid_exists(pid)


def test_a_stopped_process_is_told_of_as_stopped_with_what_it_did(hanging: tuple[int, Path]) -> None:
    pid, log = hanging
    os.kill(pid, signal.SIGSTOP)
    (seen,) = look(log.parent, limit_s=20.0)
    assert seen.owner.name == "actor rank 1"
    assert seen.state == "stopped (SIGSTOP, or a debugger)"
    assert [activity.text for activity in seen.activities] == ["update"]


def test_a_process_without_a_handler_is_not_sent_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_py_spy(monkeypatch, tmp_path)
    process = subprocess.Popen(["sleep", "600"])
    try:
        found = read_stacks(process.pid, log_path=tmp_path / "x.log", limit_s=20.0)
        assert found.how.endswith("; the process has no handler for SIGUSR2")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
