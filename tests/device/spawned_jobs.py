"""What the processes of tests/device/test_spawned.py do."""

import os
import time

import psutil

from megappo.errors import CheckpointError


def square(rank: int, port: int) -> tuple[int, int]:
    """Return something of each rank, and the port."""
    return rank * rank, port


def refuse(rank: int, port: int) -> None:
    """Rank 1 refuses, the other waits for it."""
    if rank == 1:
        print("rank 1 was here")
        raise CheckpointError("no such folder")
    time.sleep(600)


def fail(rank: int, port: int) -> None:
    """Fail as nobody foresaw."""
    print("the last line of the log")
    raise RuntimeError("what is this")


def die(number: int, rank: int, port: int) -> None:
    """Rank 1 is killed; the other one fails of it."""
    if rank == 1:
        os.kill(os.getpid(), number)
    parent = os.getppid()
    while any_other_child_lives(parent):
        time.sleep(0.01)
    raise RuntimeError("connection closed by peer")


def any_other_child_lives(parent: int) -> bool:
    """Whether a process beside this one has the same parent and has not ended."""
    others = psutil.Process(parent).children()
    return any(
        child.pid != os.getpid()
        and child.status() != psutil.STATUS_ZOMBIE
        and "spawn_main" in " ".join(child.cmdline())
        for child in others
    )
