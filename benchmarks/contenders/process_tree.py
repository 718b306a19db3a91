"""CPU seconds and memory of a contender's processes, by what they do."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

RAY = "Ray"
DRIVER = "driver"
_ROLES = {"ActorWorker": "trainer", "RolloutHost": "engine", "RewardWorker": "scoring"}
"""Class of a Ray process, as its title names it -> what it does."""


@dataclass
class ProcessTree:
    """A process and all below it. What is neither a worker of ours nor below one belongs to Ray."""

    root: psutil.Process
    _role_of: dict[int, str] = field(default_factory=dict[int, str])
    """By process id, once it is known: titles change with what a process is doing."""

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far, by role."""
        found: dict[str, float] = {}
        for process, role in self._processes().items():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            found[role] = found.get(role, 0.0) + times.user + times.system
        return found

    def peak_bytes(self) -> dict[str, int]:
        """Return the most memory that the processes of each role have held, each at its own time (VmHWM, Linux)."""
        found: dict[str, int] = {}
        for process, role in self._processes().items():
            found[role] = found.get(role, 0) + _peak_bytes(process.pid)
        return found

    def _processes(self) -> Mapping[psutil.Process, str]:
        roles = {self.root: DRIVER}
        for process in self.root.children(recursive=True):
            try:
                roles[process] = self._role(process)
            except psutil.NoSuchProcess:
                continue
        return roles

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.root.pid:
            return RAY  # below the root, and not below a worker
        if (known := self._role_of.get(process.pid)) is not None:
            return known
        title = " ".join(process.cmdline())
        role = next((role for name, role in _ROLES.items() if f"ray::{name}" in title), None)
        if role is None:
            parent = process.parent()
            role = RAY if parent is None else self._role(parent)
        if role != RAY:
            self._role_of[process.pid] = role
        return role


def _peak_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
