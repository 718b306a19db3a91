"""A rollout engine over one SGLang server, of its own or one that runs already."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from megappo.config.cluster import DeviceKind
from megappo.config.profile import ProfileConfig
from megappo.config.rollout import PauseMode, SamplingConfig
from megappo.device.backend import resolve_backend
from megappo.errors import RequestError
from megappo.rollout.engine import EngineSpec, GenerateRequest, GroupOutput, WeightGroup
from megappo.rollout.model_folder import read_weight_names
from megappo.rollout.prompts import check_requests
from megappo.rollout.sglang_client import SGLangClient
from megappo.rollout.sglang_command import server_command
from megappo.rollout.sglang_external import ExternalServer, check_external
from megappo.rollout.sglang_generation import SGLangGeneration
from megappo.rollout.sglang_limits import request_limits
from megappo.rollout.sglang_server import SGLangServer
from megappo.rollout.sglang_tensors import read_server_tensors
from megappo.rollout.sglang_weights import Generation, SGLangWeights
from megappo.rollout.weight_update import WeightUpdate
from megappo.weights.buckets import BucketMeta
from megappo.weights.checksums import HeldTensor
from megappo.weights.delivery import Delivery


class SGLangEngine:
    """Generation and weight hand-over over HTTP. A server of its own dies with this process, and nothing else dies with
    it; one of `rollout.urls` is left alone.

    The `seed` of a generate call has no effect: SGLang seeds its sampler once, when it starts, from the seed and the
    number of the engine.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._config = spec.config
        self._weight_timeout_s = spec.weight_timeout_s
        self._device = DeviceKind(resolve_backend(spec.device).kind)
        self._model = spec.model
        self._seed = spec.seed + spec.index  # else all engines of a run would draw the same numbers
        self._folder = folder = Path(spec.model.path)
        required, optional = read_weight_names(folder)
        self._name = f"engine sglang {spec.index}"
        self._update = WeightUpdate(name=self._name, required=required, optional=optional)
        self._server = _server_of(spec, self._name)
        self._sleeps = self._device is DeviceKind.cuda and isinstance(self._server, SGLangServer)
        self._client = SGLangClient(url=self._server.url, api_key=self._server.api_key, failure=self._server.failure)
        self._generation = SGLangGeneration(self._client, spec.config, folder=folder)
        self._weights = SGLangWeights(
            self._client,
            self._update,
            generation=Generation(
                pause=spec.pause or PauseMode.retract, gate=self._generation.gate, abort=self._generation.abort
            ),
            tensors=read_server_tensors(folder, ranks=spec.config.tensor, device=self._device),
            timeout_s=spec.weight_timeout_s,
        )

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._server.url

    @property
    def at_once(self) -> int | None:
        """Sequences that run at the same time."""
        return self._config.sglang.max_running_requests

    async def start(self) -> None:
        """Start the server and wait until it takes requests."""
        if isinstance(self._server, SGLangServer):
            self._server.launch(
                server_command(self._config, self._model, device=self._device, door=self._server.door, seed=self._seed)
            )
        self._client.open()
        try:
            await self._wait_until_listening()
            await self._take_over()
        except BaseException:
            await self.stop()
            raise

    async def _take_over(self) -> None:
        """Make a server that answers ready for requests, and learn what it can take."""
        timeout_s = self._config.start_timeout_s
        if isinstance(self._server, SGLangServer):
            self._server.release_ports()
            await self._client.freeze_objects(timeout_s=timeout_s)
        else:
            version = await check_external(self._client, self._server, folder=self._folder, timeout_s=timeout_s)
            if version != 0:
                self._update.spoil(f"its weights are those of version {version}, not of the model folder")
        info = await self._client.server_info("start", timeout_s=timeout_s)
        self._limits = request_limits(info, self._folder)

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
        check_requests(requests, sampling, limits=self._limits, name=self._name)
        if sampling.min_new_tokens:  # SGLang computes log-probs after it has taken the end tokens out
            raise RequestError(
                f"{self._name}: generate: min_new_tokens={sampling.min_new_tokens} is not possible with true log-probs "
                "(use 0, or rollout.engine=hf)"
            )
        version = await self._weights.version()
        async for group in self._generation.generate(requests, sampling, version_in_use=version):
            yield group

    async def abort(self) -> None:
        """End what is under way; returns once it has come back with its tokens."""
        await self._require_alive("abort")
        await self._generation.abort()

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a weight group with all tensor-parallel ranks."""
        await self._require_alive("join weight group")
        await self._weights.join_group(group)

    async def leave_weight_group(self, name: str) -> None:
        """Leave a weight group, if it was joined."""
        await self._require_alive("leave weight group")
        await self._weights.leave_group(name)

    async def held_tensors(self) -> list[HeldTensor]:
        """Return what is known of the tensors of all ranks."""
        return self._weights.held

    async def begin_weights(self) -> None:
        """Pause generation and open a weight update."""
        await self._require_alive("begin weights")
        await self._weights.begin()

    async def load_weights(self, bucket: BucketMeta, *, delivery: Delivery) -> None:
        """Receive one bucket into the server's parameters, in place."""
        await self._weights.load(bucket, delivery)

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksums of held tensors."""
        return await self._weights.checksums(names)

    async def end_weights(self, version: int) -> None:
        """Check that the hand-over was complete, then go on generating."""
        await self._weights.end(version)

    async def weight_version(self) -> int:
        """Return the version that the server's outputs carry."""
        await self._require_alive("weight version")
        return await self._weights.version()

    async def sleep(self) -> None:
        """Give weights and KV cache back on CUDA; nothing on a CPU, where the server cannot, nor those of a server that
        runs already."""
        if self._sleeps:
            await self._require_alive("sleep")
            self._update.spoil("its weights were released by sleep() and not handed over since")
            await self._client.release_memory(timeout_s=self._weight_timeout_s)

    async def wake_weights(self) -> None:
        """Take the memory of the weights again; they must be handed over before anything is generated."""
        await self._resume_memory("wake", ["weights"])

    async def wake_cache(self) -> None:
        """Take the memory of KV cache and CUDA graphs again."""
        await self._resume_memory("wake cache", ["kv_cache", "cuda_graph"])

    async def _resume_memory(self, phase: str, tags: list[str]) -> None:
        """Take memory again by SGLang's names of its parts (sglang 0.5.23, srt/constants.py)."""
        if self._sleeps:
            await self._require_alive(phase)
            await self._client.resume_memory(tags, timeout_s=self._weight_timeout_s)

    async def health(self) -> None:
        """Return once the server's scheduler has answered, between two of its batches; also while generation is paused,
        unlike SGLang's own /health. The deadline is recovery.hang_timeout_s."""
        await self._require_alive("health")
        await self._client.server_info("health", timeout_s=self._config.recovery.hang_timeout_s)

    async def begin_profile(self, folder: Path, prefix: str, config: ProfileConfig) -> None:
        """Have the server profile all its ranks; port `ProfilesItself`."""
        kinds = ["CPU"]
        if self._device is DeviceKind.cuda:
            kinds += ["GPU", "MEM"] if config.memory else ["GPU"]
        wanted = {"activities": kinds, "with_stack": config.stack, "record_shapes": config.shapes}
        body = {"output_dir": str(folder), "profile_prefix": prefix, **wanted}
        await self._client.start_profile(body, timeout_s=self._config.request_timeout_s)

    async def end_profile(self) -> None:
        """Have it write them."""
        await self._client.stop_profile(timeout_s=self._config.request_timeout_s)

    async def stop(self) -> None:
        """End a server of its own and all its processes."""
        await self._client.close()
        await self._server.stop()

    async def _require_alive(self, phase: str) -> None:
        """Raise EngineError when the server has not been started or has ended."""
        if self._server.exit_code() is not None:
            raise await self._server.failure(phase, "the server is gone")


def _server_of(spec: EngineSpec, name: str) -> SGLangServer | ExternalServer:
    """Return the server of an engine, not started."""
    if spec.config.urls:
        return ExternalServer(name=name, url=spec.config.urls[spec.index], key_variable=spec.config.api_key_env)
    return SGLangServer(name=name, log_path=spec.log_path, address=spec.address)
