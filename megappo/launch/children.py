"""Processes that a launch starts on its node. They get no signal of the terminal, and end when the launch is gone.

Slurm sends a signal to all processes below a job's tasks, whatever session they are in. What is meant for the run must
not end the Ray below it.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megappo.observability.logging import tail

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOG_LINES = 15
_FOR_THE_RUN = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a process which has no handler."""


class Child:
    """One child process, in a session of its own: signals reach it through `send` only."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None = None,
        ignores_signals: bool = False,
    ) -> None:
        """`log` takes what it prints; None: it goes where that of this process does. `ignores_signals`: SIGUSR1 and
        SIGUSR2 do nothing to it and to all that it starts, but where a process has a handler for them."""
        self._log = log
        output = None if log is None else log.open("ab")
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare_deaf if ignores_signals else _end_with_parent,
        )
        if output is not None:
            output.close()

    def poll(self) -> int | None:
        """Return its exit code as shells have it (137 for SIGKILL), None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it has ended."""
        self._process.send_signal(number)

    def end(self, *, grace_s: float) -> None:
        """Ask it to end, and kill what is left of its session after `grace_s`; safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def has_printed(self, beginning: str) -> bool:
        """Whether a line of its log begins so, of the last ones."""
        return self._log is not None and any(line.startswith(beginning) for line in tail(self._log, _LOG_LINES))

    def last_lines(self) -> str:
        """Return the end of its log, indented below a message."""
        lines = [] if self._log is None else tail(self._log, _LOG_LINES)
        return "".join(f"\n  | {line}" for line in lines)


def _end_with_parent() -> None:
    """SIGTERM when the thread that started this process is gone, SIGKILL of it included (Linux, prctl(2))."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prepare_deaf() -> None:
    for number in _FOR_THE_RUN:
        signal.signal(number, signal.SIG_IGN)  # which the program that is run keeps, unlike a handler
    _end_with_parent()
