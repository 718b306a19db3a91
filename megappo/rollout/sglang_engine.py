"""A rollout engine over one SGLang server of its own."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from megappo.config.cluster import DeviceKind
from megappo.config.rollout import SamplingConfig
from megappo.device.backend import resolve_backend
from megappo.rollout.engine import EngineSpec, GenerateRequest, GroupOutput, WeightGroup
from megappo.rollout.model_folder import read_end_tokens, read_vocabulary_size, read_weight_names
from megappo.rollout.prompts import check_prompts
from megappo.rollout.sglang_client import RequestRefused, SGLangClient
from megappo.rollout.sglang_command import server_command
from megappo.rollout.sglang_server import SGLangServer
from megappo.rollout.weight_update import WeightUpdate
from megappo.weights.buckets import BucketMeta


class SGLangEngine:
    """Generation and weight hand-over over HTTP; the server dies with this process, and nothing else dies with it.

    The `seed` of a generate call has no effect: SGLang seeds its sampler once, when it starts, from the seed and the
    number of the engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._config = spec.config
        self._weight_timeout_s = spec.weight_timeout_s
        self._device = DeviceKind(resolve_backend(spec.device).kind)
        self._model = spec.model
        self._seed = spec.seed + spec.index  # else all engines of a run would draw the same numbers
        folder = Path(spec.model.path)
        self._end_tokens = read_end_tokens(folder)
        required, optional = read_weight_names(folder)
        self._name = f"engine sglang {spec.index}"
        self._vocabulary = read_vocabulary_size(folder)
        self._update = WeightUpdate(name=self._name, required=required, optional=optional)
        self._server = SGLangServer(name=self._name, log_path=spec.log_path)
        self._client = SGLangClient(url=self._server.url, api_key=self._server.api_key, failure=self._server.failure)

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._server.url

    async def start(self) -> None:
        """Start the server and wait until it takes requests."""
        command = server_command(
            self._config, self._model, device=self._device, ports=self._server.ports, seed=self._seed
        )
        self._server.launch(command)
        self._client.open()
        try:
            await self._wait_until_listening()
        except BaseException:
            await self.stop()
            raise
        self._server.release_ports()
        await self._client.freeze_objects(timeout_s=self._config.request_timeout_s)

    async def _wait_until_listening(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        while not await self._client.listening():
            if self._server.exit_code() is not None:
                raise await self._server.failure("start", "the server ended")
            if time.monotonic() > deadline:
                raise await self._server.failure("start", f"not ready within {self._config.start_timeout_s:g} s")
            await asyncio.sleep(0.1)

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield each group as it finishes; a group that is no longer wanted is aborted."""
        await self._require_alive("generate")
        self._update.require_usable()
        check_prompts(requests, vocabulary=self._vocabulary, name=self._name)
        # More than the server can run would only wait there: a request's deadline would then count the wait, and
        # every waiting request would hold a connection.
        largest = max((request.num_samples for request in requests), default=1)
        slots = asyncio.Semaphore(max(1, 2 * self._config.sglang.max_running_requests // largest))

        async def sample(request: GenerateRequest) -> GroupOutput:
            async with slots:
                return await self._client.generate(
                    request, sampling, end_tokens=self._end_tokens, timeout_s=self._config.request_timeout_s
                )

        tasks = [asyncio.create_task(sample(request)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a weight group with all tensor-parallel ranks."""
        await self._require_alive("join weight group")
        await self._client.join_weight_group(group, timeout_s=self._weight_timeout_s)

    async def begin_weights(self) -> None:
        """Pause generation and open a weight update, closing one that a failed hand-over left open."""
        await self._require_alive("begin weights")
        self._update.begin()
        await self._client.pause(timeout_s=self._weight_timeout_s)
        try:
            await self._client.begin_weight_update(timeout_s=self._weight_timeout_s)
        except RequestRefused:  # one is open
            await self._client.end_weight_update(timeout_s=self._weight_timeout_s)
            await self._client.begin_weight_update(timeout_s=self._weight_timeout_s)

    async def load_weights(self, bucket: BucketMeta, *, group: str) -> None:
        """Receive one bucket into the server's parameters, in place."""
        self._update.receive(bucket.names)
        await self._client.load_bucket(bucket, group=group, timeout_s=self._weight_timeout_s)

    async def end_weights(self, version: int) -> None:
        """Check that the hand-over was complete (SGLang skips unknown names silently), then go on generating."""
        self._update.check_names()
        await self._client.end_weight_update(timeout_s=self._weight_timeout_s)
        await self._client.flush_cache(timeout_s=self._weight_timeout_s)
        await self._client.set_weight_version(version, timeout_s=self._weight_timeout_s)
        await self._client.resume(timeout_s=self._weight_timeout_s)
        self._update.complete()

    async def weight_version(self) -> int:
        """Return the version that the server's outputs carry."""
        await self._require_alive("weight version")
        return await self._client.weight_version(timeout_s=self._weight_timeout_s)

    async def sleep(self) -> None:
        """Give weights and KV cache back on CUDA; nothing on a CPU, where the server cannot."""
        if self._device is DeviceKind.cuda:
            await self._require_alive("sleep")
            self._update.spoil("its weights were released by sleep() and not handed over since")
            await self._client.release_memory(timeout_s=self._weight_timeout_s)

    async def wake(self) -> None:
        """Take the memory again; the weights must be handed over before anything is generated."""
        if self._device is DeviceKind.cuda:
            await self._require_alive("wake")
            await self._client.resume_memory(timeout_s=self._weight_timeout_s)

    async def health(self) -> None:
        """Return if the server's scheduler answers."""
        await self._require_alive("health")
        await self._client.ask_scheduler(timeout_s=self._config.request_timeout_s)

    async def stop(self) -> None:
        """End the server and all its processes."""
        await self._client.close()
        await self._server.stop()

    async def _require_alive(self, phase: str) -> None:
        """Raise EngineError when the server has not been started or has ended."""
        if self._server.exit_code() is not None:
            raise await self._server.failure(phase, "the server is gone")
