"""The watchdog of a run: tells who waits for whom when the run does not get on, and says what becomes of it.

A thread of the driver looks at its open waits (`megappo.observability.waiting`). A report is written when

- a wait is without news for `watchdog.warn_s`: the run goes on;
- a wait reaches its limit: the run ends, or waits on (`watchdog.on_hang`);
- the driver is sent SIGUSR2: the run goes on.

Engines and rewards have limits and recoveries of their own (`rollout.recovery`, `reward.timeout_s`), which the watchdog
leaves alone: it reports an engine that hangs before it is killed, and is asked nothing more.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megappo.cluster.watchdog_report import Facts, WaitSeen, head_of, text_of
from megappo.config.watchdog import OnHang, WatchdogConfig
from megappo.observability.board import SUFFIX, read_board, this_machine
from megappo.observability.logging import get_logger
from megappo.observability.phases import phases_under_way
from megappo.observability.processes import Seen, look
from megappo.observability.run_directory import write_atomically
from megappo.observability.waiting import Verdict, Wait, ask_when_overdue, open_waits

logger = get_logger(__name__)

Lines = Callable[[], Sequence[str]]
"""Says how a part of the run is; called from any thread."""

_LOOK_S = 15.0
"""Longest time to look at the processes of all machines."""
_MOST_REPORTS = 30
"""Of a run; a run that is that ill is not told of any more."""
_SIGNAL = signal.SIGUSR2


class Watchdog:
    """Of one run; started and stopped by the session."""

    def __init__(self, config: WatchdogConfig, *, log_dir: Path, note: Callable[[str], None]) -> None:
        """`log_dir` holds the logs and boards of the workers and takes the reports; `note` is told, from any thread."""
        self._config = config
        self._log_dir = log_dir
        self._note = note
        self._parts: dict[str, Lines] = {}
        self._writing = threading.Lock()
        self._written = 0
        self._ended = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._restore_signal: Callable[[], None] = lambda: None

    def tell(self, part: str, lines: Lines) -> None:
        """Name who says, in reports, how a part of the run is."""
        self._parts[part] = lines

    def start(self) -> None:
        """Begin to watch. From the main thread, SIGUSR2 is listened to."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._remove_boards(of_living=False)
        ask_when_overdue(self._judge)
        for end in (self._wake, self._woken):
            end.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._listen()
            logger.info("kill -%s %d writes a report of who waits for whom", _SIGNAL.name[3:], os.getpid())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        """Have the signal wake the thread at once, although the main thread may wait in C code for long: the number of
        a signal is written by the interpreter's own handler (signal.set_wakeup_fd)."""
        old = signal.signal(_SIGNAL, _do_nothing)
        old_descriptor = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(old_descriptor)
            signal.signal(_SIGNAL, old)

        self._restore_signal = restore

    def stop(self) -> None:
        """Watch no longer; safe to call twice."""
        if self._thread is None:
            return
        self._ended.set()
        ask_when_overdue(None)
        self._restore_signal()
        self._wake.send(b"\0")
        self._thread.join(_LOOK_S)
        self._thread = None
        self._wake.close()
        self._woken.close()
        self._remove_boards(of_living=True)

    def _remove_boards(self, *, of_living: bool) -> None:
        """Remove what an earlier session of the run left, or this one leaves."""
        here = this_machine()
        for path in self._log_dir.glob(f"*{SUFFIX}"):
            reading = None if of_living else read_board(path)
            if reading is None or reading.owner.machine != here or not reading.owner.is_alive():
                path.unlink(missing_ok=True)

    def _watch(self) -> None:
        """Body of the thread."""
        warn_s = self._config.warn_s
        tick_s = None if warn_s is None else min(1.0, warn_s / 4)
        while not self._ended.is_set():
            woken, _, _ = select.select([self._woken], [], [], tick_s)
            if self._ended.is_set():
                return
            if woken and _SIGNAL in self._woken.recv(64):
                self._report(f"asked for by {_SIGNAL.name}", None)
            if warn_s is not None:
                self._warn(warn_s)

    def _warn(self, warn_s: float) -> None:
        long = [wait for wait in open_waits() if not wait.warned and wait.quiet_s >= warn_s]
        for wait in long:
            wait.warned = True
        if long:
            # The innermost: what the others are made of.
            wait = long[-1]
            self._report(f"{wait.phase} is without news for {wait.quiet_s:.0f} s (watchdog.warn_s={warn_s:g})", wait)

    def _judge(self, wait: Wait) -> Verdict:
        """Say what becomes of a wait whose time is up; called in the thread that waits."""
        goes_on = self._config.on_hang is OnHang.wait
        key = f" ({wait.key})" if wait.key else ""
        then = "; it waits on (watchdog.on_hang=wait)" if goes_on else ""
        told = self._report(f"{wait.phase} has waited {wait.limit_s:g} s, its limit{key}{then}", wait)
        return Verdict(goes_on=goes_on, told=told)

    def _report(self, why: str, wait: Wait | None) -> str:
        """Write a report. Returns, for an error, who is probably to blame and where the report is."""
        with self._writing:
            if self._written >= _MOST_REPORTS:
                return ""
            self._written += 1
            try:
                return self._write(why, wait)
            except Exception:  # foreign processes, /proc and Ray: what goes wrong there must not end a run
                logger.exception("the report of a hang failed")
                return ""

    def _write(self, why: str, wait: Wait | None) -> str:
        waits = [_seen(one) for one in open_waits()]
        facts = Facts(
            why=why,
            of=None if wait is None else _seen(wait),
            waits=waits,
            phases=phases_under_way(),
            processes=_look_everywhere(self._log_dir),
            parts={part: list(lines()) for part, lines in self._parts.items()},
        )
        path = self._free_path()
        write_atomically(path, text_of(facts))
        logger.warning("%s: report in %s", why, path)
        self._note("\n".join([f"hang report {path}", *(f"  {line}" for line in head_of(facts))]))
        blamed = f"probably to blame: {facts.suspect}; " if facts.suspect else ""
        return f"; {blamed}stacks of all processes are in {path}"

    def _free_path(self) -> Path:
        number = 1
        while (path := self._log_dir / f"hang_{number}.txt").exists():
            number += 1
        return path


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Be a handler: without one the signal would end the process."""


def _seen(wait: Wait) -> WaitSeen:
    return WaitSeen(
        phase=wait.phase,
        thread=wait.thread,
        seconds=time.monotonic() - wait.since,
        quiet_s=wait.quiet_s,
        limit_s=wait.limit_s,
        key=wait.key,
        outstanding=list(wait.outstanding()),
    )


def _look_everywhere(log_dir: Path) -> list[Seen]:
    """Look at the workers of this machine, and have a task on every other node look at those there."""
    deadline = time.monotonic() + _LOOK_S
    elsewhere = _begin_elsewhere(log_dir)
    found = look(log_dir, limit_s=_LOOK_S)
    if elsewhere:
        done, _ = ray.wait(elsewhere, num_returns=len(elsewhere), timeout=max(0.0, deadline - time.monotonic()))
        for ref in done:
            try:
                found += ray.get(ref)
            except RayError as error:
                logger.warning("a node could not be looked at: %s", error)
    # Nodes of a test may share a machine.
    return list({(one.owner.machine, one.owner.pid): one for one in found}.values())


def _begin_elsewhere(log_dir: Path) -> list[Any]:  # Any: object references
    if not ray.is_initialized():
        return []
    own = ray.get_runtime_context().get_node_id()
    task: Any = ray.remote(look)  # type: ignore[call-overload]  # its keyword argument is fine
    return [
        task.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(log_dir, limit_s=_LOOK_S / 2)
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own
    ]
