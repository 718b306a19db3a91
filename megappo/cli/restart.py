"""A run that comes back by itself: the command runs in a process of its own and is started again after some failures.

Started again is what may go better the next time: a worker or engine that died or did not answer in time, a driver that
was killed. What would fail again is not: a configuration that is refused, numbers that are not finite, a disk that is
full; nor what was asked to end. A process of its own, since a driver that was killed cannot start itself, and since
nothing of a failed one (Ray, ports, memory) is left for the next.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megappo.checkpoint.names import checkpoints_in
from megappo.config.run import RunConfig
from megappo.errors import INTERRUPTED, EngineError, WorkerError
from megappo.launch.children import Child
from megappo.observability.run_directory import RunDirectory

RESTARTS = "MEGAPPO_RESTARTS"
"""Environment variable of the process that trains: how often the run was started again before it."""
_WORTH_IT = frozenset(f"failed: {error.__name__}" for error in (WorkerError, EngineError))
"""How a run ended, by its summary, that is started again."""
_KILLS = {128 + number: number.name for number in signal.Signals if 128 + number != INTERRUPTED}
"""Exit code of a process that was killed -> by what."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.1
_END_S = 30.0
"""What the process that trains has to end when this one does."""
_LONGEST_WAIT_S = 600.0

Say = Callable[[str], None]
Identity = tuple[int, int] | None


def restarts_so_far() -> int | None:
    """Return how often this run was started again; None: it is not to be started again by itself."""
    return int(os.environ[RESTARTS]) if RESTARTS in os.environ else None


def run_with_restarts(config: RunConfig, command: str, overrides: Sequence[str]) -> int | None:
    """Carry out a command in processes of its own, as `config.restart` says. Returns its exit code; None: it is to be
    carried out in this process.

    Args:
        command: train, sft or rm.
        overrides: as on the command line.
    """
    if config.restart.max < 1 or restarts_so_far() is not None:
        return None
    return Supervisor(config, command, overrides, say=_say).run()


@dataclass(slots=True)
class Supervisor:
    """Starts one command until it is done, or not worth another start. Used from the main thread."""

    config: RunConfig
    command: str
    overrides: Sequence[str]
    say: Say
    program: Sequence[str] = (sys.executable, "-m", "megappo")
    received: Counter[signal.Signals] = field(default_factory=Counter[signal.Signals])
    """Signals of this process, which are passed on."""

    def run(self) -> int:
        """Return the exit code of the last process."""
        folder = RunDirectory(path=run_folder(self.config, self.command))
        earlier = set(_checkpoints(folder).values())
        previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        newest: int | None = None
        restarts = in_a_row = 0
        try:
            while True:
                summary = _identity(folder.summary)
                code = self._run_once(newest, restarts)
                reason = self._why_again(code, folder.summary, summary)
                if reason is None:
                    return code
                last, newest = newest, _newest_but(earlier, folder)
                in_a_row = 1 if newest != last else in_a_row + 1
                if in_a_row > self.config.restart.max:
                    self.say(f"{reason}; not started again: restart.max={self.config.restart.max} without a checkpoint")
                    return code
                restarts += 1
                if not self._wait(reason, newest, in_a_row):
                    return code
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_once(self, newest: int | None, restarts: int) -> int:
        """Return the exit code of one process that trains; it begins as it was told to, unless there is a checkpoint of
        an earlier one."""
        resume = [] if newest is None else ["trainer.resume=auto"]
        child = Child(
            [*self.program, self.command, *self.overrides, *resume], environment=os.environ | {RESTARTS: str(restarts)}
        )
        passed = Counter[signal.Signals]()
        try:
            while (code := child.poll()) is None:
                for number, count in list(self.received.items()):
                    while passed[number] < count:
                        passed[number] += 1
                        child.send(number)
                time.sleep(_POLL_S)
        finally:
            child.end(grace_s=_END_S)
        return code

    def _why_again(self, code: int, summary: Path, before: Identity) -> str | None:
        """Return what the run failed of, if it is worth another start. `before`: the summary that was there."""
        if code == 0 or self._is_asked_to_end:
            return None
        if (killed_by := _KILLS.get(code)) is not None:
            return f"the driver was killed by {killed_by}"
        if _identity(summary) in (None, before):
            return None
        how = json.loads(summary.read_text())["exit"]
        return how if how in _WORTH_IT else None

    def _wait(self, reason: str, newest: int | None, number: int) -> bool:
        """Tell of the restart and wait for it; returns whether it is still wanted."""
        limit, wait_s = self.config.restart.max, self.config.restart.wait_s * 2 ** (number - 1)
        wait_s = min(wait_s, _LONGEST_WAIT_S)
        where = "as it was begun" if newest is None else f"from the checkpoint of step {newest}"
        self.say(f"{reason}; restart {number} of at most {limit} in a row, {where}, in {wait_s:g} s")
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self._is_asked_to_end:
            time.sleep(min(_POLL_S, wait_s))
        return not self._is_asked_to_end

    @property
    def _is_asked_to_end(self) -> bool:
        return any(number != signal.SIGUSR2 for number in self.received)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received[signal.Signals(number)] += 1


def run_folder(config: RunConfig, command: str) -> Path:
    """Return the folder in which a command keeps its run."""
    folders = {"train": Path(config.run.dir) / config.run.name, "sft": config.sft.output, "rm": config.rm.output}
    return Path(folders[command])


def _identity(path: Path) -> Identity:
    """Return what tells a file or folder from another one of its name; None: there is none."""
    return (found.st_ino, found.st_mtime_ns) if path.exists() and (found := path.stat()) else None


def _checkpoints(folder: RunDirectory) -> dict[int, Identity]:
    return {step: _identity(path) for step, path in checkpoints_in(folder.checkpoints).items()}


def _newest_but(earlier: set[Identity], folder: RunDirectory) -> int | None:
    """Return the step of the newest checkpoint that was not there at first."""
    return max((step for step, made in _checkpoints(folder).items() if made not in earlier), default=None)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
