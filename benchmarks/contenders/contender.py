"""The benchmark's side of a contender: starts its process, gives it turns, counts what its processes take."""

import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.contenders.process_tree import RAY, ProcessTree
from benchmarks.contenders.turns import MARK, STEP
from benchmarks.environment import ROOT

_LAST_LINES = 12
_END_S = 30.0


@dataclass(kw_only=True)
class Turn:
    """One step of a contender."""

    cpu_s: Mapping[str, float]
    """By role of its processes."""
    wall_s: float
    report: Mapping[str, Any]
    """What it told: `tokens`, `response_tokens` and more (Any: JSON)."""

    @property
    def own_cpu_s(self) -> float:
        """CPU seconds without Ray's processes."""
        return sum(seconds for role, seconds in self.cpu_s.items() if role != RAY)

    @property
    def whole_cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.cpu_s.values())


@dataclass
class ContenderProcess:
    """A contender's processes. Use as a context manager: leaving ends them."""

    name: str
    command: Sequence[str]
    log: Path
    timeout_s: float = 600.0
    """Longest start or step."""
    turns: list[Turn] = field(default_factory=list[Turn])
    peak_bytes: dict[str, int] = field(default_factory=dict[str, int])
    _rest_s: float = 0.0
    _rest_cpu_s: float = 0.0

    def __enter__(self) -> "ContenderProcess":
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._tree = ProcessTree(psutil.Process(self._process.pid))
        try:
            self.parameters = self._listen().get("parameters")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def take_turn(self) -> Turn:
        """Have it do one step."""
        assert self._process.stdin is not None
        before, start = self._tree.cpu_s(), time.perf_counter()
        self._process.stdin.write(f"{STEP}\n")
        self._process.stdin.flush()
        report = self._listen()
        wall_s, after = time.perf_counter() - start, self._tree.cpu_s()
        cpu_s = {role: after[role] - before.get(role, 0.0) for role in after}
        self.peak_bytes = self._tree.peak_bytes()
        self.turns.append(Turn(cpu_s=cpu_s, wall_s=wall_s, report=report))
        return self.turns[-1]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes so far."""
        return sum(self._tree.cpu_s().values())

    def note_rest(self, cpu_s: float, wall_s: float) -> None:
        """Note what it took while it had nothing to do."""
        self._rest_cpu_s, self._rest_s = self._rest_cpu_s + cpu_s, self._rest_s + wall_s

    @property
    def resting_cpu(self) -> float:
        """CPU seconds per wall second in which it had nothing to do."""
        return self._rest_cpu_s / self._rest_s if self._rest_s else float("nan")

    def _listen(self) -> dict[str, Any]:
        """Wait for what it tells. Raises RuntimeError with the end of its log."""
        assert self._process.stdout is not None
        late = threading.Timer(self.timeout_s, lambda: _kill(self._processes()))
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
        finally:
            late.cancel()
        last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise RuntimeError(
            "\n".join([f"{self.name} ended, or said nothing for {self.timeout_s:g} s ({self.log})", *last])
        )

    def end(self) -> None:
        """End it: it gets to stop its own processes, and what is left then is killed."""
        assert self._process.stdin is not None
        processes = self._processes()
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        _kill(processes)
        self._process.wait()

    def _processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill those that are left."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def middle(turns: Sequence[Turn], role: str) -> float:
    """Return the median CPU seconds of a role over turns; 0 where there is none."""
    return statistics.median(turn.cpu_s.get(role, 0.0) for turn in turns)
