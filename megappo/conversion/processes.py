"""The processes of a tool: this one, several that it starts on this machine, or those that torchrun started.

All of them follow the same plan and write the files of their own share. What one of them cannot do ends all, with the
reason of the first (`megappo.device.together`).
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megappo.device.process_group import open_store
from megappo.device.spawned import ADDRESS, run_spawned
from megappo.errors import MegappoError

_TIMEOUT = timedelta(hours=12)
"""A process waits for the others at the end of a phase, which may be the writing of terabytes."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and its like, tell a process."""

Job = Callable[[], int]
"""Returns an exit code, or raises the same MegappoError in all processes. To run in other processes it must be
picklable."""


def run_job(job: Job, *, num_processes: int = 1) -> int:
    """Run a job in a world of processes and return its exit code.

    Under torchrun (or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) its processes are the
    world, whatever `num_processes` says.

    Raises:
        MegappoError: the job did, or a process died (under torchrun the first process prints it instead).
    """
    if all(name in os.environ for name in _LAUNCHER):
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return _run_launched(job)
    if num_processes > 1:
        return max(run_spawned(partial(_run_rank, job, num_processes), num_processes))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return _run_in_world(job)


def _run_launched(job: Job) -> int:
    """Be a process of the launcher. What all raise, the first says."""
    is_first = dist.get_rank() == 0
    try:
        return _run_in_world(job)
    except MegappoError as error:
        if is_first:
            print(error, file=sys.stderr)
        return error.exit_code


def _run_in_world(job: Job) -> int:
    try:
        return job()
    finally:
        dist.destroy_process_group()


def _run_rank(job: Job, world_size: int, rank: int, port: int) -> int:
    """Be one of the processes that `run_job` started."""
    torch.set_num_threads(1)
    store = open_store(ADDRESS, port, world_size=world_size, is_first=rank == 0, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    return _run_in_world(job)
