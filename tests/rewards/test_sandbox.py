"""Programs that try what they must not: how each ends, and that nothing of it is left."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import replace

import pytest

from megappo.errors import CapabilityError
from megappo.rewards.sandbox.host import End, Ended, Program, check_sandbox, run_programs
from tests.rewards.sandboxed import LIMITS, processes_with, run, skip_without_sandbox, wait_until


@pytest.fixture(autouse=True)
def sandbox() -> None:
    skip_without_sandbox()


ENDLESS = {
    "sleep": "import time\ntime.sleep(10000)",
    "busy loop": "while True: pass",
    "deaf sleeper": "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(10000)",
    "closed streams": "import os, time\nfor n in range(3): os.close(n)\ntime.sleep(10000)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": (
        "import threading, time\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(10000,)).start()\n    except RuntimeError: pass"
    ),
}


def test_programs_that_do_not_end_are_killed_and_the_next_one_runs():
    mark = uuid.uuid4().hex
    # The bombs become processes that can be told from outside.
    ended = run(*ENDLESS.values(), _exec("import time; time.sleep(10000)", mark), time_s=0.5)
    assert [one.end for one in ended] == [End.time] * (len(ENDLESS) + 1)
    assert processes_with(mark) == []
    (after,) = run("print(1)")
    assert after == Ended(end=End.exited, exit_code=0, stdout="1\n", stderr="")


def test_runs_for_which_no_time_is_left_end_by_time():
    ended = run("import time; time.sleep(10000)", "print(1)", time_s=0.5, total_s=0.5)
    assert [(one.end, one.stdout) for one in ended] == [(End.time, ""), (End.time, "")]


def _exec(program: str, mark: str) -> str:
    """Return a program that becomes another one, with a word in its command line."""
    return f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {program!r}, {mark!r}])"


FORKED_HOGS = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = b'x' * (60 << 20)
        time.sleep(10000)
os.wait()
"""
TAKING_TOO_MUCH = {
    "endless print": ("while True: print('x' * 1000)", End.output, None, ""),
    "endless errors": ("import os\nwhile True: os.write(2, b'x' * 1000)", End.output, None, "x" * 4000),
    "memory of one process": ("held = bytearray(1 << 30)", End.exited, 1, "MemoryError"),
    "memory of several": (FORKED_HOGS, End.memory, None, ""),
    "a large file": ("open('a', 'wb').truncate(9 << 20)", End.exited, 1, "OSError: [Errno 27] File too large"),
    "many files of some size": (
        "for n in range(9): open(str(n), 'wb').write(bytes(1 << 20))",
        End.exited,
        1,
        "OSError: [Errno 28] No space left on device",
    ),
    "many files": (
        "for n in range(9999): open(str(n), 'w')",
        End.exited,
        1,
        "OSError: [Errno 28] No space left on device: '",
    ),
    "open files": ("held = [open('/dev/null') for _ in range(99)]", End.exited, 1, "OSError: [Errno 24] Too many open"),
    "memory of no process": ("import os\nos.memfd_create('a')", End.exited, 1, "PermissionError: [Errno 1]"),
    "a higher limit": (
        "import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (99, 99))",
        End.exited,
        1,
        "ValueError: not allowed to raise maximum limit",
    ),
}


def test_programs_that_take_too_much_are_stopped():
    ended = run(*(program for program, *_ in TAKING_TOO_MUCH.values()))
    for (name, (_, end, exit_code, text)), one in zip(TAKING_TOO_MUCH.items(), ended, strict=True):
        assert one.end == end, (name, one)
        if exit_code is not None:
            assert one.exit_code == exit_code, (name, one)
        assert text in one.stderr, (name, one)
        assert len(one.stdout) < 200_000


OUTSIDE = {
    "write to a system folder": ("open('/usr/bin/x', 'w')", "Read-only file system"),
    "write to the root": ("open('/x', 'w')", "Read-only file system"),
    "write to Python": ("import sys; open(sys.prefix + '/x', 'w')", "Read-only file system"),
    "write to a device": ("open('/dev/sda', 'w')", "Read-only file system"),
    "read the users": ("open('/etc/passwd')", "No such file"),
    "read the code that runs it": (f"open({__file__!r})", "No such file"),
    "leave by a parent": ("import os; os.listdir('/proc/1/root')", "Permission denied"),
    "read process 1": ("open('/proc/1/mem', 'rb')", "Permission denied"),
    "read the environment of process 1": ("open('/proc/1/environ', 'rb')", "Permission denied"),
    "write a setting of the kernel": ("open('/proc/sys/user/max_user_namespaces', 'w')", "Permission denied"),
    "become root": ("import os; os.setuid(0)", "Operation not permitted"),
    "mount": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.mount(b'a', b'/sandbox', b'tmpfs', 0, None)\n"
        "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
        "Operation not permitted",
    ),
    "be root of a namespace": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.unshare(0x10000000)\n"
        "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
        "Operation not permitted",
    ),
    "a namespace by clone": (
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.syscall(56, 0x10000011, 0, 0, 0, 0)\n"
        "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
        "No space left on device" if os.uname().machine == "x86_64" else "",
    ),
    "IPv4": ("import socket; socket.create_connection(('93.184.216.34', 80))", "Operation not permitted"),
    "IPv6": ("import socket; socket.socket(socket.AF_INET6)", "Operation not permitted"),
    "a name": ("import urllib.request as r; r.urlopen('http://example.com')", "URLError"),
    "the host of a virtual machine": (
        "import socket; socket.socket(40, socket.SOCK_STREAM)",
        "Operation not permitted",
    ),
    "packets": ("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "Operation not permitted"),
}


def test_nothing_outside_can_be_reached():
    ended = run(*(program for program, _ in OUTSIDE.values()))
    for (name, (_, text)), one in zip(OUTSIDE.items(), ended, strict=True):
        assert (one.end, one.exit_code) == (End.exited, 1), (name, one)
        assert text in one.stderr, (name, one)


def test_sockets_of_this_machine_are_not_reached():
    name = "\0" + uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        here = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        (ended,) = run(here)
        assert "ConnectionRefusedError" in ended.stderr
        exec(here)  # outside it is reached


def test_the_world_inside_is_small(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    (ended,) = run(
        "import os\n"
        "print(sorted(name for name in os.listdir('/proc') if name.isdigit()) == ['1', str(os.getpid())])\n"
        "print(os.getuid(), os.getgid(), os.getgroups() in ([], [65534]) or os.getgroups())\n"
        "print(os.getcwd(), os.listdir('.'))\n"
        "print('SECRET_KEY' in os.environ)\n"
        "print([name for name in os.listdir('/proc/self/fd') if int(name) > 3])\n"
        "print(open('/proc/net/dev').read().count(':'))\n"
        "print(open('/proc/self/oom_score_adj').read().strip())\n"
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["True", "1000 1000 True", "/sandbox ['main.py']", "False", "[]", "1", "1000"]


def test_a_program_gets_its_input_and_its_end_is_told():
    ended = run(
        Program(program="print(input()[::-1])", stdin="abc\nd"),
        Program(program="import sys; sys.stdin.close(); print('closed')", stdin="x" * 5_000_000),
        Program(program="import sys; print(len(sys.stdin.read()))", stdin="x" * 5_000_000),
        "exit(3)",
        "import os; os.kill(os.getpid(), 11)",
        "import os; os.kill(os.getpid(), 9)",
        "import os, signal\n"
        "for process in (1, -1):\n"
        "    for number in signal.valid_signals():\n"
        "        try: os.kill(process, number)\n"
        "        except OSError: pass\n"
        "print('tried')",
        "import sys; sys.stdout.buffer.write(b'\\xff\\n')",
        "print('\ud800')",
        "\0",
        "import numpy; print(numpy.arange(3).sum())",
        "import asyncio; asyncio.run(asyncio.sleep(0)); print('loop')",
        "import multiprocessing as m\nif __name__ == '__main__':\n    print(m.Pool(2).map(abs, [-1, -2]))",
        "import tempfile; print(tempfile.TemporaryFile().write(b'abc'))",
    )
    assert [(one.end, one.exit_code, one.stdout) for one in ended] == [
        (End.exited, 0, "cba\n"),
        (End.exited, 0, "closed\n"),
        (End.exited, 0, "5000000\n"),
        (End.exited, 3, ""),
        (End.exited, -11, ""),
        (End.exited, -9, ""),
        (End.exited, 0, "tried\n"),
        (End.exited, 0, "\ufffd\n"),
        (End.exited, 0, "?\n"),
        (End.exited, 1, ""),
        (End.exited, 0, "3\n"),
        (End.exited, 0, "loop\n"),
        (End.exited, 0, "[1, 2]\n"),
        (End.exited, 0, "3\n"),
    ]


DAEMON = """
import os, sys, time
open('left', 'w').write('x')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(10000)', '{mark}'])
    os._exit(0)
os.wait()
"""


def test_daemons_and_files_of_a_run_do_not_reach_the_next():
    mark = uuid.uuid4().hex
    look = "import os; print([n for n in os.listdir('/proc') if n.isdigit() and n not in ('1', str(os.getpid()))])"
    ended = run(DAEMON.format(mark=mark), look, "import os; print(os.listdir('.'))")
    assert [(one.exit_code, one.stdout) for one in ended] == [(0, ""), (0, "[]\n"), (0, "['main.py']\n")]
    assert processes_with(mark) == []


def test_a_cancelled_call_leaves_nothing():
    mark = uuid.uuid4().hex
    program = Program(program=_exec("import time; time.sleep(10000)", mark))

    async def cancel() -> None:
        call = asyncio.create_task(run_programs([program], LIMITS))
        await asyncio.to_thread(wait_until, lambda: processes_with(mark))
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    wait_until(lambda: not processes_with(mark))


def test_the_sandbox_dies_with_the_process_that_scores():
    mark = uuid.uuid4().hex
    program = _exec("import time; time.sleep(10000)", mark)
    scoring = f"from tests.rewards.sandboxed import run; run({program!r})"
    process = subprocess.Popen([sys.executable, "-c", scoring])
    try:
        wait_until(lambda: processes_with(mark))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: not processes_with(mark))


def test_a_machine_that_does_not_allow_it_is_named_with_the_step():
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no program unshare, with which to take the right to user namespaces away")
    take_away = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" "$@"'
    check = [sys.executable, "-c", "from tests.rewards.sandboxed import refusal; print(refusal())"]
    command = [unshare, "--user", "--map-root-user", "sh", "-c", take_away, *check]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "cannot be made on this machine: unshare (new user, mount" in result.stdout, result


def test_a_sandbox_in_which_python_does_not_run_is_refused():
    with pytest.raises(CapabilityError, match="does not run in it"):
        check_sandbox(replace(LIMITS, memory_bytes=1 << 20))
