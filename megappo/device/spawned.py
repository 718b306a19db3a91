"""Processes that a command starts on this machine for one job; they end with it, however it ends."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, cast

from megappo.errors import INTERRUPTED, MegappoError, WorkerError
from megappo.observability.logging import redirect_process_output, tail

T = TypeVar("T")

ADDRESS = "127.0.0.1"
"""Where the first process listens for the others."""
_INTERRUPTED_S = 5.0
"""What processes have to clean up after Ctrl-C, which reaches them, too."""
_LOG_LINES = 15

# Any: multiprocessing's connections have another type on each platform.
Pipe = Any


def run_spawned(work: Callable[[int, int], T], num_processes: int, *, logs: Sequence[Path] | None = None) -> list[T]:
    """Call `work(rank, port)` in as many processes; returns their results, rank 0 first.

    Args:
        work: picklable; the first rank may listen at `ADDRESS` on the port, which nobody else gets.
        logs: take what each process prints; None: it appears where that of this process does.

    Raises:
        MegappoError: the first error of a process; the others are ended.
        WorkerError: a process died, or failed in another way; names it and the last lines of its log.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Pipe] = []
    with socket.socket() as reserved:
        # Bound without listening: nobody else gets the port, and the first rank's store may listen on it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((ADDRESS, 0))
        port = reserved.getsockname()[1]
        try:
            for rank in range(num_processes):
                ours, theirs = context.Pipe(duplex=False)
                log = None if logs is None else logs[rank]
                process = context.Process(target=_serve, args=(work, rank, port, theirs, log), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(processes, pipes, logs)
        except KeyboardInterrupt:
            deadline = time.monotonic() + _INTERRUPTED_S
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            raise
        finally:
            # Their results are here, or nobody wants them: others may wait for the one that failed.
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[BaseProcess], pipes: list[Pipe], logs: Sequence[Path] | None) -> list[Any]:
    results: dict[int, Any] = {}  # Any: what was pickled
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        for ready in wait(list(waiting)):
            rank = waiting[cast(Pipe, ready)]
            try:
                succeeded, answer = pipes[rank].recv()
            except EOFError:
                processes[rank].join()
                succeeded, answer = False, WorkerError(f"process {rank} {_end_of(processes[rank].exitcode)}")
            if not succeeded:
                _raise_first(rank, answer, processes, logs)
            results[rank] = answer
    return [results[rank] for rank in range(len(pipes))]


def _raise_first(rank: int, error: MegappoError, processes: list[BaseProcess], logs: Sequence[Path] | None) -> None:
    """Raise a process's error, or why another one died: the broken connections that it leaves may be told of first."""
    died = [number for number, process in enumerate(processes) if (process.exitcode or 0) < 0]
    if died:
        rank = died[0]
        error = WorkerError(f"process {rank} {_end_of(processes[rank].exitcode)}")
    if isinstance(error, WorkerError) and logs is not None:
        error = WorkerError("\n".join([str(error), "last lines of its log:", *tail(logs[rank], _LOG_LINES)]))
    raise error


def _end_of(exit_code: int | None) -> str:
    """Say how a process ended that gave no answer."""
    if exit_code is None or exit_code >= 0:
        return f"ended without an answer (exit code {exit_code})"
    name = signal.Signals(-exit_code).name
    reason = ": the machine may have run out of memory (use one with more, or fewer processes)"
    return f"was ended by {name}" + (reason if name == "SIGKILL" else "")


def _serve(work: Callable[[int, int], T], rank: int, port: int, pipe: Pipe, log: Path | None) -> None:
    """Be one of the processes."""
    end_with_parent()
    if log is not None:
        redirect_process_output(log)
    try:
        answer: tuple[bool, T | MegappoError] = True, work(rank, port)
    except MegappoError as error:
        answer = False, error
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # the one that started it says so
    except Exception:  # the boundary of a process
        answer = False, WorkerError(f"process {rank} failed:\n{traceback.format_exc()}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # once the answer is there, the process is ended
    pipe.send(answer)
    pipe.close()


def end_with_parent() -> None:
    """In a process of `multiprocessing`: end at once when the process that started it is gone, SIGKILL included.

    `daemon=True` ends a child only where its parent has the time to.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="end-with-parent").start()
