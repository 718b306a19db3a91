"""What the processes of a run do, seen from outside: their boards, the system's word on them, and their stacks."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from megappo.observability.board import SUFFIX, Activity, GroupPosition, Owner, read_board, this_machine
from megappo.observability.stacks import Stacks, read_stacks

_AT_ONCE = 8
"""Processes that are looked at side by side."""
_MOST_CHILDREN = 16
_STATES = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP, or a debugger)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits in the kernel for a device",
    psutil.STATUS_ZOMBIE: "dead",
    psutil.STATUS_DEAD: "dead",
}
"""States that explain why a process does not answer."""
GONE = "gone"


@dataclass(kw_only=True, slots=True, frozen=True)
class Child:
    """A process that a worker started: a scoring process, an engine's server."""

    pid: int
    command: str
    state: str
    stacks: Stacks


@dataclass(kw_only=True, slots=True, frozen=True)
class Seen:
    """A worker process."""

    owner: Owner
    title: str
    """As `ps` shows it; Ray writes the method there that an actor runs."""
    state: str
    """What explains a process that does not answer; empty: it runs, or waits as processes do."""
    cpu: float
    """CPUs that it used while it was looked at."""
    activities: Sequence[Activity]
    positions: Sequence[GroupPosition]
    stacks: Stacks
    children: Sequence[Child] = ()

    @property
    def explains(self) -> bool:
        """Whether its state alone explains that it does not answer."""
        return bool(self.state)


def look(folder: Path, *, limit_s: float) -> list[Seen]:
    """Look at every process of this machine that has a board in a folder, for `limit_s` in all or little more.

    A board whose process is gone and that names phases under way is that of a process that was killed; others are left
    out.
    """
    deadline = time.monotonic() + limit_s
    here = this_machine()
    boards = [(path, reading) for path in sorted(folder.glob(f"*{SUFFIX}")) if (reading := read_board(path))]
    mine = [(path, reading.owner) for path, reading in boards if reading.owner.machine == here]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="look") as threads:
        seen = list(threads.map(lambda pair: _look_at(*pair, deadline=deadline), mine))
    return [one for one in seen if one is not None]


def _look_at(path: Path, owner: Owner, *, deadline: float) -> Seen | None:
    reading = read_board(path)  # now, beside the stacks
    if reading is None or reading.owner != owner:
        return None
    activities, positions = reading.activities, reading.positions
    if not owner.is_alive():
        if not activities:
            return None
        return Seen(
            owner=owner, title="", state=GONE, cpu=0.0, activities=activities, positions=positions, stacks=Stacks()
        )
    process, began = psutil.Process(owner.pid), time.monotonic()
    try:
        before = sum(process.cpu_times()[:2])
        stacks = read_stacks(owner.pid, log_path=path.with_suffix(".log"), limit_s=deadline - time.monotonic())
        children = [_child(child, deadline=deadline) for child in process.children(recursive=True)[:_MOST_CHILDREN]]
        used = sum(process.cpu_times()[:2]) - before
        return Seen(
            owner=owner,
            title=" ".join(process.cmdline()).strip(),
            state=_STATES.get(process.status(), ""),
            cpu=used / max(time.monotonic() - began, 0.01),
            activities=activities,
            positions=positions,
            stacks=stacks,
            children=[child for child in children if child is not None],
        )
    except psutil.Error:
        return Seen(
            owner=owner, title="", state=GONE, cpu=0.0, activities=activities, positions=positions, stacks=Stacks()
        )


def _child(child: psutil.Process, *, deadline: float) -> Child | None:
    """Look at a process that a worker started; None: it has ended."""
    try:
        status, command = child.status(), " ".join(child.cmdline()) or child.name()
    except psutil.Error:
        return None
    if status == psutil.STATUS_ZOMBIE:
        return None
    limit_s = deadline - time.monotonic()
    is_python = "python" in command[:200]
    stacks = read_stacks(child.pid, log_path=None, limit_s=limit_s) if is_python and limit_s > 0 else Stacks()
    return Child(pid=child.pid, command=command, state=_STATES.get(status, ""), stacks=stacks)
