"""The weights of one SGLang server (0.5.23): what its HTTP calls do with them, in the order of a hand-over."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config.rollout import PauseMode
from megappo.errors import EngineError
from megappo.rollout.engine import WeightGroup
from megappo.rollout.generation_gate import GenerationGate
from megappo.rollout.sglang_client import RequestRefused, SGLangClient
from megappo.rollout.sglang_tensors import ServerTensors
from megappo.rollout.weight_update import WeightUpdate, refuse_other_shapes
from megappo.weights.buckets import BucketMeta
from megappo.weights.delivery import Delivery, FolderDelivery, GroupDelivery, SharedDelivery
from megappo.weights.safetensors_io import HuggingFaceWeights


@dataclass(kw_only=True, slots=True, frozen=True)
class Generation:
    """How generation is held while weights change."""

    pause: PauseMode
    gate: GenerationGate
    """Every generate request passes it."""
    abort: Callable[[], Awaitable[None]]
    """Ends all requests under way."""


class SGLangWeights:
    """The weight half of an SGLang engine. SGLang loads in place: `update` tells whether the weights may be used.

    What can be read back: `/weights_checker` returns a checksum of every parameter of every rank, as the server holds
    it (joined, cut, padded); `megappo.rollout.sglang_tensors` says which of them are understood. Its
    `/get_weights_by_name` returns the first values of a tensor of some families only, and is not used.
    """

    def __init__(
        self,
        client: SGLangClient,
        update: WeightUpdate,
        *,
        generation: Generation,
        tensors: ServerTensors,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the deadline of every call."""
        self._client = client
        self._update = update
        self._generation = generation
        self._shapes = tensors.shapes
        self.held = tensors.held
        self._timeout_s = timeout_s
        self._session_open = False
        self._parameters: list[str] = []
        """Names of what the server can tell the checksums of, once it has told."""

    async def join_group(self, group: WeightGroup) -> None:
        """Join a weight group with all tensor-parallel ranks."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("join weight group", "/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Leave a weight group, if it was joined."""
        try:
            await self._post("leave weight group", "/destroy_weights_update_group", {"group_name": name})
        except RequestRefused:  # there is no such group
            return

    async def begin(self) -> None:
        """Pause generation. The weights are unusable from here on, until `end`."""
        generation = self._generation
        self._update.begin()
        self._session_open = False  # or of a hand-over that failed
        if generation.pause in (PauseMode.abort, PauseMode.wait):
            generation.gate.close()
            if generation.pause is PauseMode.abort:
                await generation.abort()
            try:
                await asyncio.wait_for(generation.gate.drained(), self._timeout_s)
            except TimeoutError:
                raise EngineError(
                    f"{self._update.name}: begin weights: requests were still under way after {self._timeout_s:g} s "
                    "(raise weight_sync.timeout_s, or abort them first)"
                ) from None
        mode = "in_place" if generation.pause is PauseMode.in_place else "retract"
        await self._post("pause", "/pause_generation", {"mode": mode})

    async def load(self, bucket: BucketMeta, delivery: Delivery) -> None:
        """Load one bucket in place."""
        self._update.receive(bucket.names)
        match delivery:
            case GroupDelivery(group=group):
                # Refusing it before it is received would leave the sender waiting; SGLang refuses other shapes itself.
                await self._open_session()
                body = {
                    "names": bucket.names,
                    "dtypes": [bucket.dtype] * len(bucket.names),
                    "shapes": bucket.shapes,
                    "group_name": group,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                await self._post("load weights", "/update_weights_from_distributed", body)
            case SharedDelivery(payloads=payloads):
                # An error while it loads these, or a folder, ends the whole server.
                refuse_other_shapes(self._update.name, zip(bucket.names, bucket.shapes), self._shapes)
                await self._open_session()
                body = {
                    "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                await self._post("load weights", "/update_weights_from_tensor", body)
            case FolderDelivery(path=path):
                with HuggingFaceWeights(path) as weights:
                    found = [(name, weights.shape(name)) for name in sorted(weights.names())]
                refuse_other_shapes(self._update.name, found, self._shapes)
                body = {"model_path": str(path), "flush_cache": False}
                await self._post("load weights", "/update_weights_from_disk", body)

    async def _open_session(self) -> None:
        """Open an update, closing one that a failed hand-over left open. Without one a sender would wait for ever."""
        if self._session_open:
            return
        body: dict[str, object] = {"selector": "all"}
        try:
            await self._post("begin weights", "/begin_weight_update", body)
        except RequestRefused:  # one is open
            await self._post("end weights", "/end_weight_update", {})
            await self._post("begin weights", "/begin_weight_update", body)
        self._session_open = True

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksums of held tensors (`name@rank`); one that the server does not have is left out.

        The first call computes all of them: it is how the names are learned by which others are left out later.
        """
        wanted = {name.rpartition("@")[0] for name in names}
        # The server leaves out what contains one of these.
        skipped = [name for name in self._parameters if not any(name in other for other in wanted)]
        body: dict[str, object] = {"action": "checksum", "skip_tensor_list": skipped}
        answer = await self._post("verify weights", "/weights_checker", body)
        found = {
            f"{name}@{rank['parallelism_info'][0]['tp_rank']}": value
            for rank in answer["ranks"]
            for name, value in rank["checksums"].items()
        }
        self._parameters = self._parameters or sorted({name.rpartition("@")[0] for name in found})
        return {name: found[name] for name in names if name in found}

    async def end(self, version: int) -> None:
        """Check that the hand-over was complete (SGLang skips unknown names silently), then go on generating."""
        self._update.check_names()
        if self._session_open:
            await self._post("end weights", "/end_weight_update", {})
            self._session_open = False
        await self._flush_cache()
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post("set weight version", "/update_weight_version", body)
        await self._post("continue", "/continue_generation", {})
        self._update.complete()
        self._generation.gate.open()

    async def _flush_cache(self) -> None:
        """Drop all cached prefixes. SGLang refuses to while requests are under way (in_place): what they need stays,
        and nobody else finds it, since requests share prefixes within an epoch of the gate only."""
        try:
            await self._post("flush cache", "/flush_cache", {})
        except RequestRefused:
            if self._generation.pause is not PauseMode.in_place:
                raise

    async def version(self) -> int:
        """Return the version that outputs carry."""
        answer = await self._client.call("weight version", "GET", "/model_info", None, self._timeout_s)
        return int(answer["weight_version"])

    async def _post(self, phase: str, path: str, body: Mapping[str, object]) -> Any:  # Any: decoded JSON
        return await self._client.call(phase, "POST", path, body, self._timeout_s)
