"""The first program of an SGLang server process: `python -P sglang_host.py DEVICE [sglang option]...`.

Run as a file; imports nothing of megappo. Standard input carries the API key (one line), so that it shows neither in
the list of processes nor in a log, and stays open as long as the engine's process lives. When that is gone, however
it ended, the pipe closes and the whole process group of the server is killed. (PR_SET_PDEATHSIG would instead follow
the thread that started the server, and take only the first process.)
"""

import os
import secrets
import signal
import sys
import threading
from typing import Any, BinaryIO


def _follow_parent(pipe: BinaryIO) -> None:
    """Block until the parent's end of the pipe closes, then kill this process group."""
    pipe.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _take_api_key() -> str:
    """Read the key, start following the parent, and leave children an empty standard input."""
    pipe = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    key = pipe.readline().decode().strip()
    threading.Thread(target=_follow_parent, args=(pipe,), daemon=True, name="follow-parent").start()
    return key


class Door:
    """ASGI middleware that answers nothing without the key.

    SGLang's own leaves /health, /ready, /metrics, every OPTIONS request and web sockets open (sglang 0.5.23,
    srt/utils/auth.py).
    """

    def __init__(self, app: Any, *, key: str) -> None:  # Any: an ASGI application
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI's own types
        given = dict(scope.get("headers") or []).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def main(device: str, options: list[str]) -> None:
    """Serve until told to stop; options are those of `sglang.launch_server`."""
    key = _take_api_key()
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    if device == "cpu":
        import cpu_launch  # type: ignore[import-not-found]  # among the stand-ins, on PYTHONPATH

        cpu_launch.prepare()
    load_plugins()
    app.add_middleware(Door, key=key)
    run_server(prepare_server_args([*options, "--api-key", key]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
