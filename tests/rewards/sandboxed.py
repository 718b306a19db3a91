"""Runs programs in the sandbox for tests, and looks for what may have survived them."""

import asyncio
import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megappo.errors import CapabilityError
from megappo.rewards.sandbox.host import Ended, Limits, Program, check_sandbox, run_programs

LIMITS = Limits(
    time_s=60.0,
    total_s=200.0,
    memory_bytes=256 << 20,
    disk_bytes=8 << 20,
    output_bytes=64 << 10,
    processes=16,
)


@cache
def refusal() -> str:
    """Return why this machine does not allow the sandbox; empty: it does."""
    try:
        check_sandbox(LIMITS)
    except CapabilityError as error:
        return str(error)
    return ""


def skip_without_sandbox() -> None:
    if refusal():
        pytest.skip(refusal())


def run(*programs: str | Program, **limits: Any) -> list[Ended]:
    jobs = [Program(program=program) if isinstance(program, str) else program for program in programs]
    return asyncio.run(run_programs(jobs, replace(LIMITS, **limits)))


def processes_with(mark: str) -> list[int]:
    """Return the processes of this machine, those within sandboxes included, that have a word in their command line."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in words:
                found.append(int(folder.name))
    return found


def wait_until(condition: Any, *, most_s: float = 60.0) -> None:
    """Return when the condition holds; fails when it never does."""
    deadline = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
