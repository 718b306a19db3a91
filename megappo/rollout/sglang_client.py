"""The HTTP calls of one SGLang server (0.5.23). Every call has a deadline; every failure is an EngineError.

What generation and a weight hand-over call is in `sglang_generation` and `sglang_weights`.

aiohttp, not httpx: for 32 concurrent requests of 8 samples it takes 10-20 ms of CPU time against 60-110 ms.
"""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import aiohttp
import orjson

from megappo.errors import EngineError, RequestError

_DYING_S = 3.0
"""How long a server whose connection broke may take to end, before the error is written without its exit code."""

_AFTER_ABORT = ", although it was told to abort at rollout.request_timeout_s"

_NO_ENTRY = (401, 403)

_KEEP_ALIVE_S = 2.0
"""Longest rest of a connection before it is used again. The server closes one after 5 s (uvicorn timeout_keep_alive);
a request written at that moment is lost with it."""


class FailureReport(Protocol):
    """Makes the error of a failed call, with the engine's name and its last log lines."""

    def __call__(self, phase: str, reason: str, *, wait_s: float = 0.0) -> Awaitable[EngineError]: ...


class RequestRefused(EngineError):
    """The server answered, and did not do what it was asked."""


class SGLangClient:
    """Calls of one server, from one event loop. `open()` before the first, `close()` after the last."""

    def __init__(self, *, url: str, api_key: str | None, failure: FailureReport) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.failure = failure
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the connection pool in the running event loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(self._url, headers=self._headers, connector=connector)

    async def close(self) -> None:
        """Close all connections; safe to call twice."""
        if self._session is not None:
            await self._session.close()

    async def listening(self) -> bool:
        """Return whether the server takes requests. Raises RequestRefused when it does not take the key."""
        assert self._session is not None
        try:
            async with self._session.get("/ready", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                status = response.status
        except (aiohttp.ClientError, TimeoutError):
            return False
        if status in _NO_ENTRY:
            raise RequestRefused(str(await self.failure("start", f"refused with status {status}: not its key")))
        return status == 200

    async def freeze_objects(self, *, timeout_s: float) -> None:
        """Take the objects of start-up out of Python's garbage collection: on a CPU every flush of the cache collects,
        which would walk all of them (0.5 s)."""
        await self.call("freeze objects", "POST", "/freeze_gc", {}, timeout_s)

    async def abort_requests(self, *, timeout_s: float) -> None:
        """End all requests of the server; each answers with the tokens that it has."""
        await self.call("abort", "POST", "/abort_request", {"abort_all": True}, timeout_s)

    async def server_info(self, phase: str, *, timeout_s: float) -> dict[str, Any]:  # Any: decoded JSON
        """Return the server's settings (its key among them), once its scheduler has answered."""
        return await self.call(phase, "GET", "/server_info", None, timeout_s)

    async def release_memory(self, *, timeout_s: float) -> None:
        """Give weights and KV cache back to the device."""
        await self.call("sleep", "POST", "/release_memory_occupation", {}, timeout_s)

    async def resume_memory(self, tags: list[str], *, timeout_s: float) -> None:
        """Take the memory of some parts again; their contents are not what they were."""
        await self.call("wake", "POST", "/resume_memory_occupation", {"tags": tags}, timeout_s)

    async def start_profile(self, body: Mapping[str, object], *, timeout_s: float) -> None:
        """Begin a profile by torch.profiler in all ranks."""
        await self.call("start profile", "POST", "/start_profile", body, timeout_s)

    async def stop_profile(self, *, timeout_s: float) -> None:
        """End it; returns once the files are written."""
        await self.call("stop profile", "POST", "/stop_profile", {}, timeout_s)

    async def call(
        self, phase: str, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> Any:  # Any: decoded JSON
        """Send one request and return its answer. Raises EngineError: no answer in time, none at all, or a refusal."""
        assert self._session is not None
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, path, data=data, timeout=timeout) as response:
                content = await response.read()
        except TimeoutError:
            late = _AFTER_ABORT if phase == "generate" else ""
            raise await self.failure(phase, f"no answer within {timeout_s:g} s{late}") from None
        except aiohttp.ClientError as error:
            reason = f"connection broke ({type(error).__name__}: {error})"
            raise await self.failure(phase, reason, wait_s=_DYING_S) from error
        if response.status != 200:
            reason = f"refused with status {response.status}: {content.decode(errors='replace')[:2000]}"
            at_fault = RequestError if phase == "generate" and response.status == 400 else RequestRefused
            raise at_fault(str(await self.failure(phase, reason)))
        return orjson.loads(content) if response.content_type == "application/json" else None
