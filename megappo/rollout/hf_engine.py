"""A rollout engine inside this process: a transformers model that samples in a worker thread.

For machines where SGLang cannot be installed, and for fast tests. One device, no tensor parallelism.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megappo.config.rollout import PauseMode, SamplingConfig
from megappo.device.backend import Backend, resolve_backend
from megappo.errors import CapabilityError, EngineError
from megappo.observability.phases import in_phase
from megappo.rollout.continuation import INTERRUPT_S, has_news, no_token
from megappo.rollout.engine import EngineSpec, GenerateRequest, GroupOutput, WeightGroup
from megappo.rollout.hf_decoding import GROUPED_ATTENTION
from megappo.rollout.hf_rows import ResponseEnds
from megappo.rollout.hf_sampling import SamplingSignals, sample_responses
from megappo.rollout.hf_weights import HFWeights, ModelThread
from megappo.rollout.model_folder import read_end_tokens
from megappo.rollout.prompts import RequestLimits, check_requests
from megappo.rollout.stopping import StopStringFinder
from megappo.weights.buckets import BucketMeta, torch_dtype
from megappo.weights.checksums import HeldTensor
from megappo.weights.delivery import Delivery

T = TypeVar("T")

MAX_BATCH_BYTES = 2 * 1024**3
"""Most memory of one batch (cache and logits); more requests are sampled batch after batch."""


@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class _Call:
    """A generate call under way."""

    cancelled: threading.Event
    """Nobody listens any more."""
    aborted: threading.Event
    late: threading.Event
    """It was aborted at its deadline."""

    def interrupt(self) -> None:
        """Abort it, at its deadline."""
        self.late.set()
        self.aborted.set()


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
        self._pause = spec.pause or PauseMode.wait
        if self._pause not in (PauseMode.wait, PauseMode.abort):
            raise CapabilityError(
                f"pause={self._pause.value} needs an engine that can set requests aside, and rollout.engine=hf works "
                "batch by batch (use wait or abort)"
            )
        self._calls: set[_Call] = set()
        self._end_tokens = read_end_tokens(Path(spec.model.path))
        self._stop_strings = StopStringFinder(spec.model.path)
        self._model: PreTrainedModel | None = None
        self._weights: HFWeights | None = None

    @property
    def at_once(self) -> int | None:
        """Nothing joins a batch that has begun."""
        return None

    async def start(self) -> None:
        """Load the model folder."""
        self._model = await self._run("start", self._load, self._spec.config.start_timeout_s)
        thread = ModelThread(run=self._run, model_free=self._model_free, abort=self.abort)
        self._weights = HFWeights(
            self._model,
            name=self._name,
            backend=self._backend,
            thread=thread,
            pause=self._pause,
            timeout_s=self._spec.weight_timeout_s,
        )

    def _load(self) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            self._spec.model.path,
            dtype=torch_dtype(self._spec.config.weight_dtype(self._spec.model).value),
            attn_implementation="sdpa",  # refused for models whose attention needs more than a mask
        )
        if self._backend.kind == "cpu":
            model.set_attn_implementation(GROUPED_ATTENTION)
        torch.nn.Module.to(model, self._backend.device())  # transformers' own `to` hides its signature
        return model.eval()

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        """Yield the groups of each batch when it is done. The same requests and seed give the same samples."""
        model = self._running("generate")
        self._weight_half("generate").update.require_usable()
        check_requests(requests, sampling, limits=_limits(model), name=self._name)
        call = _Call(cancelled=threading.Event(), aborted=threading.Event(), late=threading.Event())
        self._calls.add(call)
        limits = self._spec.config
        deadline = asyncio.get_running_loop().call_later(limits.request_timeout_s, call.interrupt)
        idle = True
        try:
            for batch, how in _batches(requests, sampling, row_bytes=partial(_row_bytes, model)):
                outputs = await self._sample(model, batch, how, seed=seed, call=call)
                idle = idle and not any(map(has_news, batch, outputs))
                if idle and call.late.is_set():
                    raise EngineError(f"{self._name}: generate: {no_token(limits)}")
                for output in outputs:
                    yield output
        finally:
            deadline.cancel()
            call.cancelled.set()
            self._calls.discard(call)

    async def _sample(
        self,
        model: PreTrainedModel,
        batch: Sequence[GenerateRequest],
        how: SamplingConfig,
        *,
        seed: int,
        call: _Call,
    ) -> list[GroupOutput]:
        """Sample one batch, in the engine's thread, once no hand-over is under way."""
        timeout_s = self._spec.config.request_timeout_s + INTERRUPT_S
        signals = SamplingSignals(
            cancelled=lambda: call.cancelled.is_set() or self._stopped.is_set(), aborted=call.aborted.is_set
        )
        try:
            async with asyncio.timeout(timeout_s), self._model_free:
                work = partial(
                    sample_responses,
                    model,
                    batch,
                    how,
                    ends=self._ends(how),
                    seed=seed,
                    version=self._weight_half("generate").version,
                    signals=signals,
                )
                return await self._run("generate", work, timeout_s)
        except TimeoutError:
            raise self._too_late("generate", timeout_s) from None

    def _ends(self, sampling: SamplingConfig) -> ResponseEnds:
        """Return what ends responses."""
        tokens = torch.tensor(
            [*self._end_tokens, *sampling.stop_token_ids], dtype=torch.long, device=self._backend.device()
        )
        return ResponseEnds(tokens=tokens, strings=self._stop_strings.of(sampling.stop))

    async def abort(self) -> None:
        """End all batches at their next token; returns once the one under way has ended."""
        for call in self._calls:
            call.aborted.set()
        # Its turn comes after the batch's.
        await self._run("abort", lambda: None, self._spec.config.request_timeout_s + INTERRUPT_S)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join a weight group as rank `rank_offset`."""
        await self._weight_half("join weight group").join_group(group)

    async def leave_weight_group(self, name: str) -> None:
        """Leave a weight group, if it was joined."""
        await self._weight_half("leave weight group").leave_group(name)

    async def held_tensors(self) -> list[HeldTensor]:
        """Return all parameters."""
        return self._weight_half("held tensors").held_tensors()

    async def begin_weights(self) -> None:
        """Wait for the batch under way, or end it; keep others from starting."""
        await self._weight_half("begin weights").begin()

    async def load_weights(self, bucket: BucketMeta, *, delivery: Delivery) -> None:
        """Receive one bucket and copy what has a known name into the parameters."""
        await self._weight_half("load weights").load(bucket, delivery)

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksums of parameters."""
        return await self._weight_half("verify weights").checksums(names)

    async def end_weights(self, version: int) -> None:
        """Check that the hand-over was complete, then go on generating."""
        await self._weight_half("end weights").end(version)

    async def weight_version(self) -> int:
        """Return the version of the weights in use."""
        return self._weight_half("weight version").version

    async def sleep(self) -> None:
        """Move the weights to host memory; there is no cache between calls."""
        await self._move("sleep", torch.device("cpu"))

    async def wake_weights(self) -> None:
        """Move the weights back to the device."""
        await self._move("wake", self._backend.device())

    async def wake_cache(self) -> None:
        """Return at once: a cache lives as long as its batch."""

    async def _move(self, phase: str, device: torch.device) -> None:
        model = self._running(phase)
        await self._run(phase, partial(torch.nn.Module.to, model, device), self._spec.weight_timeout_s)

    async def health(self) -> None:
        """Return if the engine has a model; a call that hangs meets its own deadline."""
        self._running("health")

    async def stop(self) -> None:
        """Leave the weight groups and drop the model; a batch under way ends at its next token."""
        self._stopped.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._weights is not None:
            self._weights.leave_all()
        self._model = self._weights = None

    def _running(self, phase: str) -> PreTrainedModel:
        """Return the model. Raises EngineError when the engine is not started or is stopped."""
        if self._model is None:
            raise EngineError(f"{self._name}: {phase}: the engine is not running")
        return self._model

    def _weight_half(self, phase: str) -> HFWeights:
        """Return what handles the weights. Raises EngineError as `_running`."""
        self._running(phase)
        assert self._weights is not None, "it is made with the model"
        return self._weights

    async def _run(self, phase: str, work: Callable[[], T], timeout_s: float) -> T:
        """Run blocking work in the engine's thread. Raises EngineError naming the phase."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._thread.submit(in_phase(phase)(work))), timeout_s)
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


def _limits(model: PreTrainedModel) -> RequestLimits:
    """Return what the model can read."""
    config = model.config.get_text_config()
    positions: int | None = getattr(config, "max_position_embeddings", None)
    return RequestLimits(vocabulary=config.vocab_size, tokens=positions, reason="the model's positions")


def _row_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the memory of one sample: keys and values of all layers, and what choosing a token takes."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    # per vocabulary entry: logits, log-probs and probabilities in float32, their sum in float64
    return tokens * cached + config.vocab_size * (3 * 4 + 8)


def _batches(
    requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, row_bytes: Callable[[int], int]
) -> Iterator[tuple[list[GenerateRequest], SamplingConfig]]:
    """Yield batches that fit into memory, each with its way of sampling: greedy requests apart from the others."""
    for how in (sampling, replace(sampling, temperature=0.0)):
        chosen = [request for request in requests if request.greedy == (how is not sampling)]
        for batch in cut_into_batches(chosen, sampling.max_new_tokens, row_bytes=row_bytes):
            yield batch, how
