"""A rollout engine inside this process: a transformers model that samples in a worker thread.

For machines where SGLang cannot be installed, and for fast tests. One device, no tensor parallelism.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from megappo.config.rollout import SamplingConfig
from megappo.device.backend import Backend, resolve_backend
from megappo.device.process_group import destroy_named_group, init_named_group, named_group
from megappo.errors import CapabilityError, EngineError
from megappo.rollout.engine import EngineSpec, GenerateRequest, GroupOutput, WeightGroup
from megappo.rollout.hf_decoding import GROUPED_ATTENTION
from megappo.rollout.hf_parameters import folder_parameters
from megappo.rollout.hf_sampling import sample_responses
from megappo.rollout.model_folder import read_end_tokens
from megappo.rollout.prompts import check_prompts
from megappo.rollout.weight_update import WeightUpdate
from megappo.weights.buckets import BucketMeta, open_bucket, torch_dtype

T = TypeVar("T")

MAX_BATCH_BYTES = 2 * 1024**3
"""Most memory of one batch (cache and logits); more requests are sampled batch after batch."""


class HFEngine:
    """Generation with a transformers model; weights are copied into its parameters by name.

    One thread does all work on the model. A generate call gives it one batch at a time, so a hand-over that begins in
    between makes the rest of the call wait, and go on with the new weights.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if spec.config.tensor != 1:
            raise CapabilityError(
                f"rollout.tensor={spec.config.tensor} needs an engine with tensor parallelism, and rollout.engine=hf "
                "has none (use rollout.tensor=1 or rollout.engine=sglang)"
            )
        self._name = f"engine hf {spec.index}"
        self._spec = spec
        self._backend: Backend = resolve_backend(spec.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._model_free = asyncio.Lock()
        """Held while a batch is sampled, and from begin_weights to the end of a complete hand-over."""
        self._stopped = threading.Event()
        self._groups: list[str] = []
        self._version = 0
        self._model: PreTrainedModel | None = None

    async def start(self) -> None:
        """Load the model folder."""
        self._model = await self._run("start", self._load, self._spec.config.start_timeout_s)
        names = set(folder_parameters(self._model, remove_duplicate=True))
        # A parameter under two names (a tied head) may come under either, and must come under its first.
        aliases = set(folder_parameters(self._model)) - names
        self._update = WeightUpdate(name=self._name, required=names, optional=aliases)

    def _load(self) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            self._spec.model.path,
            dtype=torch_dtype(self._spec.model.dtype.value),
            attn_implementation="sdpa",  # refused for models whose attention needs more than a mask
        )
        if self._backend.kind == "cpu":
            model.set_attn_implementation(GROUPED_ATTENTION)
        self._end_tokens = torch.tensor(
            read_end_tokens(Path(self._spec.model.path)), dtype=torch.long, device=self._backend.device()
        )
        torch.nn.Module.to(model, self._backend.device())  # transformers' own `to` hides its signature
        return model.eval()

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield the groups of each batch when it is done. The same requests and seed give the same samples."""
        model = self._running("generate")
        self._update.require_usable()
        check_prompts(requests, vocabulary=model.config.get_text_config().vocab_size, name=self._name)
        for batch, how in _batches(requests, sampling, row_bytes=partial(_row_bytes, model)):
            timeout_s = self._spec.config.request_timeout_s
            cancelled = threading.Event()
            work = partial(
                sample_responses,
                model,
                batch,
                how,
                end_tokens=self._end_tokens,
                seed=seed,
                cancelled=lambda flag=cancelled: flag.is_set() or self._stopped.is_set(),
            )
            try:
                async with asyncio.timeout(timeout_s), self._model_free:
                    version = self._version
                    responses = await self._run("generate", work, timeout_s)
            except TimeoutError:
                raise self._too_late("generate", timeout_s) from None
            finally:
                cancelled.set()
            for request, samples in zip(batch, responses, strict=True):
                yield GroupOutput(group_id=request.group_id, responses=samples, policy_version=version)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a weight group as rank `rank_offset`."""
        self._running("join weight group")
        if group.backend != self._backend.dist_backend:
            raise EngineError(
                f"{self._name}: join weight group: {group.name} uses {group.backend}, and an engine on "
                f"{self._backend.kind} needs {self._backend.dist_backend}"
            )
        join = partial(
            init_named_group,
            name=group.name,
            address=group.address,
            port=group.port,
            world_size=group.world_size,
            rank=group.rank_offset,
            backend=self._backend,
            timeout_s=self._spec.weight_timeout_s,
        )
        await self._run("join weight group", join, self._spec.weight_timeout_s)
        self._groups.append(group.name)

    async def begin_weights(self) -> None:
        """Wait for the batch under way, then keep others from starting."""
        self._running("begin weights")
        if not self._update.in_progress:
            try:
                await asyncio.wait_for(self._model_free.acquire(), self._spec.weight_timeout_s)
            except TimeoutError:
                raise self._too_late("begin weights", self._spec.weight_timeout_s) from None
        self._update.begin()

    async def load_weights(self, bucket: BucketMeta, *, group: str) -> None:
        """Receive one bucket and copy what has a known name into the parameters."""
        model = self._running("load weights")
        self._update.receive(bucket.names)
        load = partial(_receive_bucket, model, bucket, group=group)
        await self._run("load weights", load, self._spec.weight_timeout_s)

    async def end_weights(self, version: int) -> None:
        """Check that the hand-over was complete, then go on generating."""
        self._running("end weights")
        self._update.check_names()
        self._version = version
        self._update.complete()
        self._model_free.release()

    async def weight_version(self) -> int:
        """Return the version of the weights in use."""
        self._running("weight version")
        return self._version

    async def sleep(self) -> None:
        """Move the weights to host memory; there is no cache between calls."""
        await self._move("sleep", torch.device("cpu"))

    async def wake(self) -> None:
        """Move the weights back to the device."""
        await self._move("wake", self._backend.device())

    async def _move(self, phase: str, device: torch.device) -> None:
        model = self._running(phase)
        await self._run(phase, partial(torch.nn.Module.to, model, device), self._spec.weight_timeout_s)

    async def health(self) -> None:
        """Return if the engine has a model; a call that hangs meets its own deadline."""
        self._running("health")

    async def stop(self) -> None:
        """Leave the weight groups and drop the model; a batch under way ends at its next token."""
        self._stopped.set()
        self._model = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        for name in self._groups:
            destroy_named_group(name)
        self._groups.clear()

    def _running(self, phase: str) -> PreTrainedModel:
        """Return the model. Raises EngineError when the engine is not started or is stopped."""
        if self._model is None:
            raise EngineError(f"{self._name}: {phase}: the engine is not running")
        return self._model

    async def _run(self, phase: str, work: Callable[[], T], timeout_s: float) -> T:
        """Run blocking work in the engine's thread. Raises EngineError naming the phase."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.submit(work)), timeout_s)
        except TimeoutError:
            raise self._too_late(phase, timeout_s) from None
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise EngineError(f"{self._name}: {phase}: {type(error).__name__}: {error}") from error

    def _too_late(self, phase: str, timeout_s: float) -> EngineError:
        return EngineError(f"{self._name}: {phase}: not done within {timeout_s:g} s")


def cut_into_batches(
    requests: Sequence[GenerateRequest], max_new_tokens: int, *, row_bytes: Callable[[int], int]
) -> Iterator[list[GenerateRequest]]:
    """Cut requests into runs whose rows, padded to the longest, stay below MAX_BATCH_BYTES (at least one request each).

    Args:
        row_bytes: memory of one sample of so many tokens.
    """
    batch: list[GenerateRequest] = []
    rows = longest = 0
    for request in requests:
        rows += request.num_samples
        longest = max(longest, len(request.prompt_tokens) + max_new_tokens)
        if batch and rows * row_bytes(longest) > MAX_BATCH_BYTES:
            yield batch
            batch, rows, longest = [], request.num_samples, len(request.prompt_tokens) + max_new_tokens
        batch.append(request)
    if batch:
        yield batch


def _row_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the memory of one sample: keys and values of all layers, and what choosing a token takes."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    # per vocabulary entry: logits, log-probs and probabilities in float32, their sum in float64
    return tokens * cached + config.vocab_size * (3 * 4 + 8)


def _receive_bucket(model: PreTrainedModel, bucket: BucketMeta, *, group: str) -> None:
    """Receive a bucket from rank 0 of a group and copy its tensors. Raises ValueError where a shape differs."""
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=model.device)
    dist.broadcast(flat, src=0, group=named_group(group))
    with torch.no_grad():
        parameters = folder_parameters(model)
        for name, tensor in open_bucket(bucket, flat).items():
            if name not in parameters:  # reported when the hand-over ends
                continue
            if parameters[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {list(parameters[name].shape)}, and {list(tensor.shape)} came")
            parameters[name].copy_(tensor)


def _batches(
    requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, row_bytes: Callable[[int], int]
) -> Iterator[tuple[list[GenerateRequest], SamplingConfig]]:
    """Yield batches that fit into memory, each with its way of sampling: greedy requests apart from the others."""
    for how in (sampling, replace(sampling, temperature=0.0)):
        chosen = [request for request in requests if request.greedy == (how is not sampling)]
        for batch in cut_into_batches(chosen, sampling.max_new_tokens, row_bytes=row_bytes):
            yield batch, how
