"""Starts the sandbox and reads what happened in it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from megappo.errors import CapabilityError, RewardError

_INSIDE = Path(__file__).with_name("inside")
_REMEDY = (
    "it needs Linux 5.14 or later with user namespaces, sysctl user.max_user_namespaces above 0; in a container: "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined, on Ubuntu 24.04 also sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; or run the code elsewhere, with the reward http"
)
_START_S = 20.0
"""Longest time in which the sandbox itself starts and ends, on a busy machine."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """What the programs of one job may take."""

    time_s: float
    """Wall-clock time of one program, and CPU time of each of its processes."""
    total_s: float
    """Wall-clock time of all programs of the job."""
    memory_bytes: int
    """Of all processes of a program together, and address space of each."""
    disk_bytes: int
    """Of all files in the working folder; they are kept in memory."""
    output_bytes: int
    """Written to standard output and standard error."""
    processes: int
    """Processes and threads at one time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """A Python program and what it reads."""

    program: str
    stdin: str = ""


class End(StrEnum):
    """How a program ended."""

    exited = "exited"
    time = "time"
    """It was killed after `time_s`, or when `total_s` was used up."""
    memory = "memory"
    output = "output"


@dataclass(kw_only=True, slots=True, frozen=True)
class Ended:
    """How one program ended."""

    end: End
    exit_code: int | None
    """Of exited: minus the number of the signal that killed it, where one did."""
    stdout: str
    stderr: str
    """The last 4000 bytes."""


def check_sandbox(limits: Limits) -> None:
    """Run a program in a sandbox, to see that it can be made here.

    Raises:
        CapabilityError: this machine does not allow it, or Python does not run in it within the limits.
        RewardError: it failed otherwise.
    """
    hello = Program(program="import threading\nthreading.Thread(target=print, args=[input()]).start()", stdin="hello")
    # In a thread, since an event loop may run in this one.
    with ThreadPoolExecutor(1) as thread:
        (ended,) = thread.submit(lambda: asyncio.run(run_programs([hello], limits))).result()
    if ended.exit_code != 0 or ended.stdout != "hello\n":
        raise CapabilityError(
            f"the code sandbox: {sys.executable} does not run in it (ended by {ended.end}, exit code "
            f"{ended.exit_code}): {ended.stderr[-500:]} (limits that are too low, or Python's files lie elsewhere than "
            f"in {', '.join(_installation())}?)"
        )


async def run_programs(programs: Sequence[Program], limits: Limits) -> list[Ended]:
    """Run Python programs in a new sandbox, one after another, each with an empty working folder.

    Raises:
        CapabilityError: this machine does not allow the sandbox; says which step was refused.
        RewardError: the sandbox itself failed, as opposed to the programs in it.
    """
    job = {
        "limits": asdict(limits),
        "show": _installation(),
        "runs": [asdict(program) for program in programs],
    }
    process = await asyncio.create_subprocess_exec(
        # Without site packages (-S), environment (-E) and the user's folder (-s): nothing but `inside`.
        *(sys.executable, "-E", "-s", "-S", "-B", str(_INSIDE)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        env={},
        start_new_session=True,
    )
    try:
        communication = process.communicate(json.dumps(job).encode())
        stdout, stderr = await asyncio.wait_for(communication, timeout=limits.total_s + _START_S)
    except TimeoutError:
        raise RewardError(
            f"the code sandbox did not answer {_START_S:g} s after its time of {limits.total_s:g} s "
            "(is this machine overloaded?)"
        ) from None
    finally:
        # Its processes are one group, and the programs' die with process 1. Also where this call was cancelled.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return _ends(stdout, stderr, process.returncode)


def _installation() -> dict[str, str]:
    """Return the folders that Python needs: path by which it asks for them -> path without symbolic links."""
    folders = {sys.prefix, sys.base_prefix}
    executable = sys.executable
    while os.path.islink(executable):
        # Every name on the way from the virtual environment's interpreter to the real one is looked up.
        executable = os.path.normpath(os.path.join(os.path.dirname(executable), os.readlink(executable)))
        folders.add(os.path.dirname(os.path.dirname(executable)))
    folders.discard("/")  # of /bin/python3, which is shown anyway
    return {folder: os.path.realpath(folder) for folder in folders}


def _ends(stdout: bytes, stderr: bytes, returncode: int | None) -> list[Ended]:
    try:
        answer = json.loads(stdout)
    except ValueError:
        text = stderr.decode(errors="replace")[-2000:]
        raise RewardError(f"the code sandbox failed with exit code {returncode}: {text}") from None
    if "refused" in answer:
        raise CapabilityError(f"the code sandbox cannot be made on this machine: {answer['refused']} ({_REMEDY})")
    return [Ended(**{**end, "end": End(end["end"])}) for end in answer["ends"]]
