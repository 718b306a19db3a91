"""One SGLang server: a child process in a session of its own, with reserved ports, a log file and a sure end."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from megappo.errors import EngineError
from megappo.rollout.sglang_command import ServerCommand, ServerDoor

_TERMINATE_S = 2.0
"""How long a server may take to end by itself before it is killed."""
_KILL_S = 2.5
_TAIL_BYTES = 64 * 1024


def reserve_port(address: str) -> socket.socket:
    """Reserve a free port on an address of this machine as long as the returned socket is open.

    The socket is bound and does not listen: the kernel then gives the port to nobody else, while a server that binds
    it by number with SO_REUSEADDR (as uvicorn and torch's TCPStore do) may listen on it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


class SGLangServer:
    """The process of one server. `name` opens every error message; output goes to the end of `log_path`."""

    def __init__(self, *, name: str, log_path: Path, address: str = "127.0.0.1") -> None:
        """`address` is where it listens."""
        self.name = name
        self.log_path = log_path
        self.api_key = secrets.token_hex(16)
        # The ranks of a server are on one machine.
        self._holders = (reserve_port(address), reserve_port("127.0.0.1"))
        http, rendezvous = (holder.getsockname()[1] for holder in self._holders)
        self.door = ServerDoor(address=address, http=http, rendezvous=rendezvous)
        self.url = f"http://[{address}]:{http}" if ":" in address else f"http://{address}:{http}"
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, command: ServerCommand) -> None:
        """Start the process; returns at once."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # SGLang leaves its sockets in the temporary folder; a short path, since socket paths are limited to 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="megappo-sglang-")
        env = os.environ | command.env | {"TMPDIR": self._folder}
        if "PYTHONPATH" in command.env and os.environ.get("PYTHONPATH"):
            env["PYTHONPATH"] = command.env["PYTHONPATH"] + os.pathsep + os.environ["PYTHONPATH"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
            )
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the server that this process is gone.
        self._process.stdin.write(f"{self.api_key}\n".encode())
        self._process.stdin.flush()

    def release_ports(self) -> None:
        """Give up the reservation, once the server listens."""
        for holder in self._holders:
            holder.close()

    def exit_code(self) -> int | None:
        """Return the exit code of the first process (negative: a signal), None while it runs."""
        return None if self._process is None else self._process.poll()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    async def failure(self, phase: str, reason: str, *, wait_s: float = 0.0) -> EngineError:
        """Return the error that says what failed, whether the server lives, and its last log lines.

        Args:
            wait_s: longest wait for the end of a server that is dying, since its last lines say why.
        """
        deadline = time.monotonic() + wait_s
        while self._process is not None and self.exit_code() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        code = self.exit_code()
        state = "" if code is None else f" (server ended with exit code {code})"
        return EngineError(f"{self.name}: {phase}: {reason}{state}\nlast lines of {self.log_path}:\n{self.log_tail()}")

    def members(self) -> list[int]:
        """Return the processes of the server that are alive."""
        if self._process is None:
            return []
        alive = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self._process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process.pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return alive

    async def stop(self) -> None:
        """End all processes of the server within 5 s and remove its temporary folder; safe to call twice."""
        self.release_ports()
        for signal_number, grace_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
            if not await self._end_group(signal_number, grace_s):
                break
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_group(self, signal_number: signal.Signals, grace_s: float) -> bool:
        """Signal the group and wait; return whether anything is left of it."""
        if self._process is None or not self._left():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)
        deadline = time.monotonic() + grace_s
        while self._left() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self._left()

    def _left(self) -> bool:
        """Return whether a process of the group is alive or the first one has not been reaped."""
        return self.exit_code() is None or bool(self.members())
