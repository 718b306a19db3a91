"""The HTTP calls of one SGLang server (0.5.23). Every call has a deadline; every failure is an EngineError.

aiohttp, not httpx: for 32 concurrent requests of 8 samples it takes 10-20 ms of CPU time against 60-110 ms.
"""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import aiohttp
import orjson

from megappo.config.rollout import SamplingConfig
from megappo.errors import EngineError
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, SampledResponse, WeightGroup
from megappo.weights.buckets import BucketMeta

_DYING_S = 3.0
"""How long a server whose connection broke may take to end, before the error is written without its exit code."""

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

    def __init__(self, *, url: str, api_key: str, failure: FailureReport) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._failure = failure
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
        """Return whether the server takes requests."""
        assert self._session is not None
        try:
            async with self._session.get("/ready", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def freeze_objects(self, *, timeout_s: float) -> None:
        """Take the objects of start-up out of Python's garbage collection: on a CPU every flush of the cache collects,
        which would walk all of them (0.5 s)."""
        await self._call("freeze objects", "POST", "/freeze_gc", {}, timeout_s)

    async def generate(
        self, request: GenerateRequest, sampling: SamplingConfig, *, end_tokens: list[int], timeout_s: float
    ) -> GroupOutput:
        """Sample one group. The oldest version of the weights that sampled any of its tokens is that of the group."""
        body = {
            "input_ids": request.prompt_tokens,
            "sampling_params": {
                "n": request.num_samples,
                "temperature": 0.0 if request.greedy else sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": sampling.max_new_tokens,
                "stop_token_ids": end_tokens,
            },
            "return_logprob": True,
        }
        answer = await self._call("generate", "POST", "/generate", body, timeout_s)
        samples = answer if isinstance(answer, list) else [answer]  # a list only where n > 1
        return GroupOutput(
            group_id=request.group_id,
            responses=[_response(sample) for sample in samples],
            policy_version=min(_oldest_version(sample["meta_info"]) for sample in samples),
        )

    async def join_weight_group(self, group: WeightGroup, *, timeout_s: float) -> None:
        """Let the server's ranks join a weight group."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._call("join weight group", "POST", "/init_weights_update_group", body, timeout_s)

    async def pause(self, *, timeout_s: float) -> None:
        """Stop generation; running requests go back to the queue and are computed again when it goes on."""
        await self._call("pause", "POST", "/pause_generation", {"mode": "retract"}, timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        """Go on generating."""
        await self._call("continue", "POST", "/continue_generation", {}, timeout_s)

    async def begin_weight_update(self, *, timeout_s: float) -> None:
        """Open a weight update."""
        await self._call("begin weights", "POST", "/begin_weight_update", {"selector": "all"}, timeout_s)

    async def load_bucket(self, bucket: BucketMeta, *, group: str, timeout_s: float) -> None:
        """Receive one bucket from rank 0 of a group. Outside of an open update the sender would wait for ever."""
        body = {
            "names": bucket.names,
            "dtypes": [bucket.dtype] * len(bucket.names),
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._call("load weights", "POST", "/update_weights_from_distributed", body, timeout_s)

    async def end_weight_update(self, *, timeout_s: float) -> None:
        """Close the weight update."""
        await self._call("end weights", "POST", "/end_weight_update", {}, timeout_s)

    async def flush_cache(self, *, timeout_s: float) -> None:
        """Drop all cached prefixes."""
        await self._call("flush cache", "POST", "/flush_cache", {}, timeout_s)

    async def set_weight_version(self, version: int, *, timeout_s: float) -> None:
        """Name the version that outputs carry from now on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._call("set weight version", "POST", "/update_weight_version", body, timeout_s)

    async def weight_version(self, *, timeout_s: float) -> int:
        """Return the version that outputs carry."""
        return int((await self._call("weight version", "GET", "/model_info", None, timeout_s))["weight_version"])

    async def ask_scheduler(self, *, timeout_s: float) -> None:
        """Return once the scheduler has answered; works while generation is paused, unlike SGLang's /health."""
        await self._call("health", "GET", "/server_info", None, timeout_s)

    async def release_memory(self, *, timeout_s: float) -> None:
        """Give weights and KV cache back to the device."""
        await self._call("sleep", "POST", "/release_memory_occupation", {}, timeout_s)

    async def resume_memory(self, *, timeout_s: float) -> None:
        """Take the memory of weights and KV cache again; the weights are not what they were."""
        await self._call("wake", "POST", "/resume_memory_occupation", {}, timeout_s)

    async def _call(
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
            raise await self._failure(phase, f"no answer within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            reason = f"connection broke ({type(error).__name__}: {error})"
            raise await self._failure(phase, reason, wait_s=_DYING_S) from error
        if response.status != 200:
            reason = f"refused with status {response.status}: {content.decode(errors='replace')[:2000]}"
            raise RequestRefused(str(await self._failure(phase, reason)))
        return orjson.loads(content) if response.content_type == "application/json" else None


def _response(sample: dict[str, Any]) -> SampledResponse:  # Any: decoded JSON
    """Return one sample of an answer of /generate."""
    meta = sample["meta_info"]
    return SampledResponse(
        tokens=sample["output_ids"],
        log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
    )


def _oldest_version(meta: dict[str, Any]) -> int:  # Any: decoded JSON
    """Return the oldest version that sampled a token of one sample (there are several after an update in between)."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    return min(int(span["version"]) for span in spans)
