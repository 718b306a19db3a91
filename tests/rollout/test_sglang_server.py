"""The server process, with small programs in the place of SGLang."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megappo.rollout.sglang_command import HOST_PROGRAM, ServerCommand
from megappo.rollout.sglang_host import Door
from megappo.rollout.sglang_server import SGLangServer, reserve_port

STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    key = sys.stdin.readline().strip()
    if len(sys.argv) == 1:
        subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.DEVNULL)
    print("key of", len(key), "characters", flush=True)
    time.sleep(60)
"""


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def program(folder: Path, text: str) -> ServerCommand:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return ServerCommand(argv=[sys.executable, str(path)], env={"STARTED_BY": "test"})


@pytest.fixture
def server(tmp_path: Path) -> SGLangServer:
    return SGLangServer(name="engine sglang 3", log_path=tmp_path / "logs" / "server.log")


def test_stop_ends_a_whole_group_that_ignores_the_request_and_may_be_called_twice(
    server: SGLangServer, tmp_path: Path
) -> None:
    server.launch(program(tmp_path, STUBBORN))
    wait_for(lambda: len(server.members()) == 2 and server.log_tail().count("key of") == 2)
    assert "key of 32 characters" in server.log_tail()
    members = server.members()
    asyncio.run(server.stop())
    asyncio.run(server.stop())
    assert server.members() == []
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in members)
    assert server.exit_code() == -signal.SIGKILL


def test_a_failure_names_engine_phase_reason_exit_code_and_the_last_log_lines(
    server: SGLangServer, tmp_path: Path
) -> None:
    server.launch(program(tmp_path, "for line in range(100): print('line', line)\nraise SystemExit(7)"))
    error = str(asyncio.run(server.failure("generate", "connection broke", wait_s=10.0)))
    first, *rest = error.splitlines()
    assert first == "engine sglang 3: generate: connection broke (server ended with exit code 7)"
    assert rest[0] == f"last lines of {server.log_path}:"
    assert rest[1:] == [f"line {number}" for number in range(80, 100)]
    asyncio.run(server.stop())


def test_the_temporary_folder_of_a_server_is_its_own_and_goes_with_it(server: SGLangServer, tmp_path: Path) -> None:
    server.launch(program(tmp_path, "import tempfile; print('at', tempfile.mkdtemp())"))
    wait_for(lambda: server.exit_code() is not None)
    folder = Path(server.log_tail().removeprefix("at ").strip())
    assert folder.is_dir()
    asyncio.run(server.stop())
    assert not folder.exists()
    assert not folder.parent.exists()


def test_a_reserved_port_is_given_to_nobody_and_can_be_listened_on() -> None:
    holder = reserve_port("127.0.0.1")
    port = holder.getsockname()[1]
    others = [reserve_port("127.0.0.1") for _ in range(500)]
    assert port not in {other.getsockname()[1] for other in others}
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        socket.create_connection(("127.0.0.1", port)).close()
    for other in [holder, *others]:
        other.close()


def test_a_server_listens_at_the_address_it_is_given(tmp_path: Path) -> None:
    server = SGLangServer(name="engine", log_path=tmp_path / "log", address="127.0.0.2")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.2", server.door.http))
    assert server.url == f"http://127.0.0.2:{server.door.http}"
    server.release_ports()


def test_each_start_adds_to_the_same_log_under_a_key_of_its_own(tmp_path: Path) -> None:
    keys = set()
    for number in range(2):
        server = SGLangServer(name="engine", log_path=tmp_path / "log")
        server.launch(program(tmp_path, f"print('start', {number})"))
        wait_for(lambda server=server: server.exit_code() is not None)
        asyncio.run(server.stop())
        keys.add(server.api_key)
    assert server.log_tail().splitlines() == ["start 0", "start 1"]
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"type": "http", "headers": [(b"authorization", b"Bearer secret")]}, ["served"]),
        ({"type": "http", "headers": [(b"authorization", b"Bearer wrong")]}, [401, b""]),
        ({"type": "http", "headers": [(b"authorization", b"secret")]}, [401, b""]),
        ({"type": "http", "method": "OPTIONS", "path": "/health", "headers": []}, [401, b""]),
        ({"type": "websocket", "headers": []}, [1008]),
        ({"type": "websocket", "headers": [(b"authorization", b"Bearer secret")]}, ["served"]),
        ({"type": "lifespan"}, ["served"]),
    ],
)
def test_the_door_answers_nothing_without_the_key(scope: dict[str, object], expected: list[object]) -> None:
    answers: list[object] = []

    async def served(_scope: object, _receive: object, _send: object) -> None:
        answers.append("served")

    async def send(message: dict[str, object]) -> None:
        answers.append(message.get("status", message.get("code", message.get("body"))))

    asyncio.run(Door(served, key="secret")(scope, None, send))
    assert answers == expected


def test_the_host_program_takes_its_key_from_the_pipe_and_its_group_dies_when_the_pipe_closes(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    for module, text in {
        "__init__": "",
        "srt/__init__": "",
        "srt/entrypoints/__init__": "",
        "srt/entrypoints/http_server": """
            class app:
                @staticmethod
                def add_middleware(middleware, key): print(middleware.__name__, key, end=" ")
        """,
        "srt/plugins": "def load_plugins(): pass",
        "srt/server_args": "def prepare_server_args(argv): return argv",
        "launch_server": """
            import subprocess, sys, time
            def run_server(args):
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
                print(args, child.pid, sys.stdin.read() == "", flush=True)
                time.sleep(60)
        """,
    }.items():
        path = package / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    process = subprocess.Popen(
        [sys.executable, "-P", str(HOST_PROGRAM), "cuda", "--port", "5"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"secret\n")
    process.stdin.flush()
    door, key, *arguments, child, input_is_empty = process.stdout.readline().decode().split()
    assert (door, key) == ("Door", "secret")
    assert " ".join(arguments) == "['--port', '5', '--api-key', 'secret']"
    assert input_is_empty == "True"
    assert "secret" not in " ".join(psutil.Process(process.pid).cmdline())
    process.stdin.close()
    assert process.wait(timeout=20) == -signal.SIGKILL
    wait_for(lambda: not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == "zombie")
