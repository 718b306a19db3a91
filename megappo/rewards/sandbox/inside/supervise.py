"""Runs programs one after another as process 1 of the sandbox, within limits, and says how each ended.

Ends: exited (with its exit code, or minus the number of the signal that killed it), time (of the run, or of all runs),
memory (of all its processes together), output. After each run, whatever it left running is killed and its files are
gone.
"""

import contextlib
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from calls import call_filter
from kernel import detach, filter_calls, hide_memory
from namespaces import USER, WORK, mount_work

_TICK_S = 0.02
"""Between two looks at time and memory."""
_STDERR_KEPT = 4000
_PROGRAM = f"{WORK}/main.py"
_PAGE = os.sysconf("SC_PAGE_SIZE")


# Any: decoded JSON, of ..host.
def run_programs(runs: Sequence[Mapping[str, str]], limits: Mapping[str, Any]) -> list[dict[str, object]]:
    """Run the programs in order and return how each ended; those for which no time is left ended by `time`."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out outside, these processes are the ones to kill
    hide_memory()
    last = time.monotonic() + limits["total_s"]
    ends: list[dict[str, object]] = []
    for position, run in enumerate(runs):
        if position:
            detach(WORK)
            mount_work(limits["disk_bytes"])
        left_s = last - time.monotonic()
        if left_s <= 0:
            ends.append({"end": "time", "exit_code": None, "stdout": "", "stderr": ""})
        else:
            ends.append(_Run(run, limits, time_s=min(left_s, limits["time_s"])).result())
    return ends


class _Run:
    """One program, from its start until none of its processes is left."""

    def __init__(self, run: Mapping[str, str], limits: Mapping[str, Any], *, time_s: float) -> None:  # Any: JSON
        self._limits = limits
        self._deadline = time.monotonic() + time_s
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        self._written = 0
        self._exit_status: int | None = None
        self._out, stdout = os.pipe()
        self._err, stderr = os.pipe()
        reason_pipe, refusal = os.pipe()  # closed by a program that starts, so that reading it ends
        with open(_PROGRAM, "wb") as file:
            file.write(run["program"].encode(errors="replace"))
        # A file, not a pipe: nobody has to feed it while the program runs. It takes nothing of the working folder.
        with open(os.memfd_create("stdin"), "w+b") as stdin:
            stdin.write(run["stdin"].encode(errors="replace"))
            stdin.seek(0)
            self._process = os.fork()
            if self._process == 0:
                _become_program(limits, (stdin.fileno(), stdout, stderr), refusal)
        for descriptor in (stdout, stderr, refusal):
            os.close(descriptor)
        with open(reason_pipe, errors="replace") as refused:
            reason = refused.read()
        if reason:
            raise RuntimeError(f"the program cannot be started: {reason}")

    def result(self) -> dict[str, object]:
        """Wait for the end and tell of it."""
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("stdout", self._out), ("stderr", self._err)):
                os.set_blocking(pipe, False)
                selector.register(pipe, selectors.EVENT_READ, name)
            pidfd = os.pidfd_open(self._process)
            selector.register(pidfd, selectors.EVENT_READ, "ended")
            end = self._wait(selector)
            self._kill_all()
            for key in list(selector.get_map().values()):
                if key.data != "ended" and end != "output":
                    end = "output" if self._drain(selector, key) else end
        for descriptor in (self._out, self._err, pidfd):
            os.close(descriptor)
        status = self._exit_status
        return {
            "end": end,
            "exit_code": os.waitstatus_to_exitcode(status) if end == "exited" and status is not None else None,
            **{name: text.decode(errors="replace") for name, text in self._output.items()},
        }

    def _wait(self, selector: selectors.BaseSelector) -> str:
        while True:
            events = selector.select(_TICK_S)
            if any(self._drain(selector, key) for key, _ in events if key.data != "ended"):
                return "output"
            self._reap(os.WNOHANG)
            if self._exit_status is not None:
                return "exited"
            if time.monotonic() > self._deadline:
                return "time"
            if _resident_bytes() > self._limits["memory_bytes"]:
                return "memory"

    def _drain(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
        """Read what there is; returns whether it is more than a program may write."""
        while True:
            try:
                chunk = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                return False
            if not chunk:
                selector.unregister(key.fd)
                return False
            self._written += len(chunk)
            kept = self._output[key.data]
            kept += chunk
            if key.data == "stderr":
                del kept[:-_STDERR_KEPT]
            if self._written > self._limits["output_bytes"]:
                return True

    def _reap(self, options: int) -> bool:
        """Take the status of ended processes; returns whether others are left."""
        while True:
            try:
                process, status = os.waitpid(-1, options)
            except ChildProcessError:
                return False
            if process == 0:
                return True
            if process == self._process:
                self._exit_status = status

    def _kill_all(self) -> None:
        # One call of the kernel that no fork can slip through; all of them are, or become, children of process 1.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self._reap(0)


def _become_program(limits: Mapping[str, Any], streams: Sequence[int], refusal: int) -> NoReturn:  # Any: JSON
    """Turn this process into the program, or say in `refusal` why not."""
    try:
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        # All others were opened by Python, which has them closed when the program starts.
        _set_limits(limits)
        if os.getuid() != USER:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        os.chdir(WORK)
        environment = {
            "HOME": WORK,
            "TMPDIR": WORK,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            # Sets and dicts in the same order each time: the same program scores the same.
            "PYTHONHASHSEED": "0",
            # Further arenas of threads would count as address space without being memory.
            "MALLOC_ARENA_MAX": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        filter_calls(call_filter())
        os.execve(sys.executable, [sys.executable, _PROGRAM], environment)
    except BaseException as error:
        os.write(refusal, f"{type(error).__name__}: {error}".encode())
    os._exit(1)


def _set_limits(limits: Mapping[str, Any]) -> None:  # Any: JSON
    cpu_s = int(limits["time_s"]) + 1
    # Where megappo does not run as root, process 1 and the one outside are of the same user.
    others = 2 if os.getuid() == USER else 0
    for which, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(which, (most, most))


def _resident_bytes() -> int:
    """Memory of all processes of the sandbox but process 1; pages that several share count once."""
    processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return sum(_read_pages(process) for process in processes)


def _read_pages(process: str) -> int:
    """Proportional share of the memory of one process; 0 when it has ended."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, ValueError):
        return 0
