"""The processes of a tool: this one, several that it starts on this machine, or those that torchrun started.

All of them follow the same plan and write the files of their own share. What one of them cannot do ends all, with the
reason of the first (`megappo.device.together`).
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from megappo.device.spawned import end_with_parent
from megappo.errors import INTERRUPTED, MegappoError

_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(hours=12)
"""A process waits for the others at the end of a phase, which may be the writing of terabytes."""
_INTERRUPTED_S = 5.0
"""What processes have to end after Ctrl-C."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and its like, tell a process."""

Job = Callable[[], int]
"""Returns an exit code. To run in other processes it must be picklable."""


def run_job(job: Job, *, num_processes: int = 1) -> int:
    """Run a job in a world of processes and return its exit code.

    Under torchrun (or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) its processes are the
    world, whatever `num_processes` says.
    """
    if all(name in os.environ for name in _LAUNCHER):
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return _run_in_world(job)
    if num_processes == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return _run_in_world(job)
    store = TCPStore(_ADDRESS, 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(rank, num_processes, store.port, job), daemon=True)
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    with _ended(processes):
        return _wait(processes)


def _run_in_world(job: Job) -> int:
    """Run the job in the world of this process. Of what all processes raise, the first says it."""
    rank = dist.get_rank()
    try:
        return job()
    except MegappoError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return error.exit_code
    finally:
        dist.destroy_process_group()


def _run_rank(rank: int, world_size: int, port: int, job: Job) -> None:
    """Be one of the processes that `run_job` started."""
    end_with_parent()
    torch.set_num_threads(1)
    store = TCPStore(_ADDRESS, port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        sys.exit(_run_in_world(job))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # the one that started it says so


@contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[None]:
    """Leave no process behind."""
    try:
        yield
    except KeyboardInterrupt:
        # Ctrl-C reaches them, too: the first of them removes what is written so far.
        deadline = time.monotonic() + _INTERRUPTED_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _wait(processes: list[BaseProcess]) -> int:
    """Wait until all have ended well, or one has not. Returns the exit code."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(int(sentinel))  # type: ignore[arg-type]  # a file descriptor
            process.join()
            if process.exitcode:
                if process.exitcode < 0:
                    print(f"process {process.name} was killed by signal {-process.exitcode}", file=sys.stderr)
                return abs(process.exitcode)
    return 0
