"""A scoring process, seen from the process that asks: start, messages, end."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from typing import IO

import psutil

from megappo.errors import DataError, WorkerError
from megappo.rewards.scoring_process import (
    LENGTH_BYTES,
    SHOW_STACKS,
    Answer,
    ProcessSettings,
    Request,
    Started,
    command,
    frame,
)

_STACKS_S = 0.3
"""Time to write where the threads are."""
_MOST_STARTS = 3
"""Tries to start a process in a row."""


@dataclass(slots=True, eq=False)
class ScoringProcess:
    """A process that takes requests."""

    popen: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    stacks: IO[bytes]
    """The process writes there where its threads are."""
    batched: frozenset[tuple[str, str]] = frozenset()
    """Its rewards and their terms that score several samples in one call."""

    def send(self, message: Request | ProcessSettings) -> None:
        """Send a message; one to a process that is gone is lost, and `receive` says so."""
        self.writer.write(frame(message))

    async def receive(self) -> Answer | Started:
        """Return the next message. Raises EOFError or OSError once the process is gone."""
        head = await self.reader.readexactly(LENGTH_BYTES)
        return pickle.loads(await self.reader.readexactly(int.from_bytes(head, "big")))

    async def where(self) -> str:
        """Return where its threads are, C code included."""
        os.kill(self.popen.pid, SHOW_STACKS)
        await asyncio.sleep(_STACKS_S)
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace")

    async def end(self) -> str:
        """Kill it with its children and wait for it; says how it ended, if it did so before."""
        # It is waited for last, so that its number cannot be another's yet.
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.popen.pid).children(recursive=True):
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.writer.close()
        self.stacks.close()
        return _ending(await asyncio.to_thread(self.popen.wait))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


async def start_process(settings: ProcessSettings, *, timeout_s: float) -> ScoringProcess:
    """Start a process and wait until its rewards are made; tries again when it dies or hangs on the way.

    Raises:
        DataError: a reward refuses its parameters.
        WorkerError: it does not start.
    """
    reason = ""
    for _ in range(_MOST_STARTS):
        process = await _launch()
        process.send(settings)
        try:
            started = await asyncio.wait_for(process.receive(), timeout_s)
        except TimeoutError:
            reason = f"it was not ready within {timeout_s:g} s\n{await process.where()}"
        except (EOFError, OSError):
            reason = f"it {await process.end()}"
            continue
        else:
            assert isinstance(started, Started)
            if started.error is None:
                process.batched = started.batched
                return process
            await process.end()
            raise DataError(started.error)
        await process.end()
    raise WorkerError(f"the scoring process did not start: {reason}")


async def _launch() -> ScoringProcess:
    ours, theirs = socket.socketpair()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the process
    with theirs:
        popen = subprocess.Popen(
            command(theirs.fileno(), stacks.fileno()),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), stacks.fileno()),
            # A group of its own: what it starts ends with it, and Ctrl-C is the business of who started it.
            start_new_session=True,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return ScoringProcess(popen, reader, writer, stacks)
