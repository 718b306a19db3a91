"""A small HTTP service for tests: answers each request with the next of a list of replies."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass(kw_only=True)
class Reply:
    """What the service answers once."""

    body: bytes
    status: int = 200
    delay_s: float = 0.0
    hang_up: bool = False


@dataclass(kw_only=True)
class Service:
    """The service and what it was asked. The last reply is repeated; None: the scores are the response lengths."""

    url: str = ""
    replies: list[Reply] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def reply(self, rows: Any) -> Reply:
        self.requests.append(rows)
        if not self.replies:
            return Reply(body=json.dumps([len(row["response"]) for row in rows]).encode())
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextmanager
def scoring_service(*replies: Reply) -> Iterator[Service]:
    """Run the service on a free local port."""
    service = Service(replies=list(replies))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            service.headers.append(dict(self.headers))
            reply = service.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(reply.delay_s)
            if reply.hang_up:
                return
            with suppress(ConnectionError):  # the other side may have given up
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_port}/score"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
