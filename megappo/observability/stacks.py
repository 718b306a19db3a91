"""Python stacks of other processes of this machine, without their help where the system allows it.

py-spy reads another process's memory and stops nothing, so it also works on a process that is stopped, or whose thread
keeps Python's lock in C code. The system may refuse that (ptrace: a container without the right, or Yama). Then the
process is sent SIGUSR2, at which Python's faulthandler writes its stacks into its log (`show_stacks_on_signal`). The
handler is C code and needs no lock, but a process that is stopped, or that waits in the kernel, does not run it.
"""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SHOW_STACKS = signal.SIGUSR2
_WRITTEN_S = 1.0
"""What a process may take to write its stacks."""
_POLL_S = 0.05
_LINES = 200
"""Most lines of one process: it may have some hundred threads."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Stacks:
    """Where the threads of a process are."""

    lines: tuple[str, ...] = ()
    how: str = ""
    """What told it, or why nothing did."""


def show_stacks_on_signal() -> None:
    """Have this process write its stacks to its standard error at SIGUSR2, whatever it does then."""
    faulthandler.register(SHOW_STACKS, file=2, all_threads=True)


def read_stacks(pid: int, *, log_path: Path | None, limit_s: float) -> Stacks:
    """Return the stacks of a process, by py-spy or else by signal.

    Args:
        log_path: where it writes its standard error; None: it is not sent a signal.
    """
    by_py_spy, refused = _by_py_spy(pid, limit_s)
    if by_py_spy:
        return Stacks(lines=_cut(by_py_spy), how="py-spy")
    if log_path is None:
        return Stacks(how=f"py-spy: {refused}")
    if not _listens(pid):
        return Stacks(how=f"py-spy: {refused}; the process has no handler for {SHOW_STACKS.name}")
    if lines := _by_signal(pid, log_path):
        return Stacks(lines=_cut(lines), how=f"faulthandler, by {SHOW_STACKS.name} (py-spy: {refused})")
    unheard = f"{SHOW_STACKS.name}: nothing was written within {_WRITTEN_S:g} s (a process that is stopped writes none)"
    return Stacks(how=f"py-spy: {refused}; {unheard}")


def _by_py_spy(pid: int, limit_s: float) -> tuple[list[str], str]:
    """Return the lines, or why there are none."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return [], "is not installed"
    try:
        found = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=max(limit_s, 0.1),
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if found.returncode == 0:
        return found.stdout.decode(errors="replace").splitlines(), ""
    errors = found.stderr.decode(errors="replace").strip().splitlines()
    return [], errors[-1].strip() if errors else f"exit code {found.returncode}"


def _listens(pid: int) -> bool:
    """Whether a process has a handler for the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (SHOW_STACKS - 1) & 1)


def _by_signal(pid: int, log_path: Path) -> list[str]:
    try:
        before = log_path.stat().st_size
        os.kill(pid, SHOW_STACKS)
    except OSError:
        return []
    deadline, size = time.monotonic() + _WRITTEN_S, before
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last, size = size, log_path.stat().st_size
        if size > before and size == last:
            break
    with log_path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace").splitlines()


def _cut(lines: list[str]) -> tuple[str, ...]:
    left_out = len(lines) - _LINES
    return tuple(lines) if left_out <= 0 else (*lines[:_LINES], f"... {left_out} lines more")
