"""One rollout engine in a process of its own. Everything it samples leaves with the answer to its call: what it has
sampled outlives it."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megappo.batch.fields import concat, offsets_of, select
from megappo.batch.stages import RolloutBatch
from megappo.cluster.observed import ObservedProcess
from megappo.cluster.runtime import begin_worker, describe_process, node_address
from megappo.config.cluster import DeviceKind
from megappo.config.profile import ProfiledPhase
from megappo.config.rollout import SINGLE_TURN, SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, SequenceInfo
from megappo.observability.clocks import ClockReading
from megappo.observability.phases import phase
from megappo.observability.run_directory import PROFILES
from megappo.observability.spans import Span
from megappo.rewards.types import Sample
from megappo.rollout.dispatch import Progress
from megappo.rollout.engine import (
    EngineSpec,
    FinishReason,
    GenerateRequest,
    GroupOutput,
    ProfilesItself,
    RolloutEngine,
    SampledResponse,
    WeightGroup,
)
from megappo.rollout.held_generation import HeldGeneration
from megappo.weight_sync.receive import Load, Reception
from megappo.weights.checksums import HeldTensor

if TYPE_CHECKING:  # it loads transformers, which an engine may do without
    from megappo.device.profiling import PhaseProfiler
    from megappo.rollout.agents.runner import AgentRunner


@dataclass(kw_only=True, slots=True, frozen=True)
class HostSpec:
    """Which engine a host runs."""

    index: int
    log_path: Path
    engine_log_path: Path
    device: DeviceKind
    visible_devices: list[str]
    """CUDA devices of the engine's bundles; empty on CPU."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupReport:
    """What the driver reads of a group that came back."""

    progress: Progress
    sequences: list[SequenceInfo]


@dataclass(kw_only=True, slots=True, frozen=True)
class GenerateCall:
    """What is asked of an engine in one call."""

    draws: list[Draw]
    begun: list[int]
    """Positions of the draws that go on; what they have comes as further arguments, in this order."""
    sampling: SamplingConfig
    seed: int


class RolloutHost(ObservedProcess):
    """Ray actor body: starts the engine, generates, receives weights. All methods are coroutines."""

    def __init__(self, spec: HostSpec, config: RunConfig) -> None:
        begin_worker(spec.log_path, role="rollout", rank=spec.index, name=f"rollout engine {spec.index}")
        if spec.visible_devices:
            # Ray shows this process one device; an engine over several bundles needs them all.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
        self.spec = spec
        self.config = config
        self._engine_made = False
        self._server_is_profiled = False

    async def start(self) -> int | None:
        """Load the tokenizer and start the engine; returns, when it answers, how many sequences it runs at once."""
        from megappo.data.tokenizer import load_tokenizer
        from megappo.rollout import ENGINES

        self._tokenizer = load_tokenizer(self.config.model.path, self.config.data.chat_template)
        self._engine: RolloutEngine = ENGINES.get(self.config.rollout.engine)(
            EngineSpec(
                config=self.config.rollout,
                model=self.config.model,
                device=self.spec.device,
                index=self.spec.index,
                seed=self.config.seed,
                log_path=self.spec.engine_log_path,
                weight_timeout_s=self.config.weight_sync.timeout_s,
                pause=self.config.weight_sync.pause,
                address=node_address(self.config.cluster),
            )
        )
        self._engine_made = True
        self._held = HeldGeneration(self._engine)
        self._programs = self._make_runner()
        await self._engine.start()
        self._profiler = self._make_profiler()
        return self._engine.at_once

    def _make_profiler(self) -> "PhaseProfiler | None":
        """Return what profiles an engine of this process; None: nothing does, or the engine is a server's."""
        if not self._is_profiled or isinstance(self._engine, ProfilesItself):
            return None
        from megappo.device.backend import resolve_backend
        from megappo.device.profiling import profiler_of

        process, backend = f"engine-{self.spec.index}", resolve_backend(self.spec.device)
        return profiler_of(self.config.profile, chosen=True, folder=self._profiles, process=process, backend=backend)

    @property
    def _is_profiled(self) -> bool:
        profile = self.config.profile
        return ProfiledPhase.generate in profile.phases and self.spec.index in profile.engines

    @property
    def _profiles(self) -> Path:
        return self.spec.log_path.parent.parent / PROFILES

    async def begin_observation(self, step: int, *, traced: bool) -> ClockReading:  # type: ignore[override]
        """As of every process; the server of an engine is told, too."""
        if isinstance(self._engine, ProfilesItself) and self._is_profiled and step in self.config.profile.steps:
            prefix = f"step_{step:06d}-{ProfiledPhase.generate.value}-engine-{self.spec.index}"
            await self._engine.begin_profile(self._profiles, prefix, self.config.profile)
            self._server_is_profiled = True
        return super().begin_observation(step, traced=traced)

    async def end_observation(self) -> list[Span]:  # type: ignore[override]
        """As of every process. The server writes its profile afterwards."""
        if self._server_is_profiled and isinstance(self._engine, ProfilesItself):
            self._server_is_profiled = False
            self._writing = asyncio.create_task(self._engine.end_profile())
        return super().end_observation()

    def _make_runner(self) -> "AgentRunner | None":
        """Return what runs rollout programs; None: the engine answers prompts directly."""
        rollout = self.config.rollout
        if rollout.agent == SINGLE_TURN:
            return None
        from megappo.rollout.agents import AGENTS
        from megappo.rollout.agents.program import AgentSpec
        from megappo.rollout.agents.runner import AgentRunner

        program = AGENTS.get(rollout.agent)(AgentSpec(config=rollout, tokenizer=self._tokenizer))
        return AgentRunner(self._held, program, rollout)

    async def identity(self) -> str:
        """Return where this process runs."""
        return describe_process()

    async def health(self) -> None:
        """Return if the engine is well."""
        await self._engine.health()

    async def abort(self) -> None:
        """End all groups under way; their calls answer with what they have."""
        await (self._programs or self._held).abort()

    async def generate(self, call: GenerateCall, *begun: list[SampledResponse]) -> list[Any]:
        """Answer with three objects per draw, in order: its report, its texts, and its tokens (a RolloutBatch, or of a
        group that was aborted what it has so far).

        Objects of their own, so that the driver reads the first and passes the others on unread.
        """
        begun_of = dict(zip(call.begun, begun, strict=True))
        requests = [
            GenerateRequest(
                group_id=draw.group_id,
                prompt_tokens=draw.prompt.tokens,
                num_samples=len(draw.sequence_ids),
                greedy=draw.greedy,
                begun=begun_of.get(position, []),
                row=draw.prompt.row,
            )
            for position, draw in enumerate(call.draws)
        ]
        if self._programs is None:
            stream = self._held.generate(requests, call.sampling, seed=call.seed)
        else:
            prompts = [draw.prompt for draw in call.draws]
            stream = self._programs.generate(requests, prompts, call.sampling, seed=call.seed)
        with phase("requests", groups=len(requests)):
            outputs = {output.group_id: output async for output in stream}
        answer: list[Any] = []
        for draw, request in zip(call.draws, requests):
            output = outputs[draw.group_id]
            answer += [_report(draw, request, output), self._texts(draw, output), _tokens(draw, output)]
        return answer

    def _texts(self, draw: Draw, output: GroupOutput) -> list[Sample]:
        from megappo.data.tokenizer import decode_response

        return [
            Sample(
                prompt=draw.prompt.text,
                response=decode_response(self._tokenizer, response.tokens),
                answer=draw.prompt.answer,
                finish_reason=response.finish_reason.value,
                source=draw.prompt.source,
                extra=draw.prompt.extra | (response.notes.extra if response.notes else {}),
                reward=draw.prompt.reward,
                response_tokens=response.sampled_tokens,
            )
            for response in output.responses
        ]

    async def pack(self, shards: list[list[int]], *groups: RolloutBatch) -> list[Any]:
        """Cut groups into shards of sequences: one RolloutBatch per shard, after a first object that is None."""
        sampled = concat(groups)
        position = {int(sequence_id): index for index, sequence_id in enumerate(sampled.sequence_ids)}
        return [None, *(select(sampled, [position[sequence_id] for sequence_id in shard]) for shard in shards)]

    async def node(self) -> str:
        """Return the address of its machine."""
        return node_address(self.config.cluster)

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join the weight group of one source."""
        await self._engine.join_weight_group(group)

    async def leave_weight_group(self, name: str) -> None:
        """Leave a weight group; what waits in it fails."""
        await self._engine.leave_weight_group(name)

    async def held_tensors(self) -> list[HeldTensor]:
        """Return the tensors whose checksums the engine can tell."""
        return await self._engine.held_tensors()

    async def begin_weights(self, version: int) -> None:
        """Open the hand-over of a version, also after one that failed."""
        self._reception = Reception(self._engine, version, timeout_s=self.config.weight_sync.timeout_s)
        self._held.hold()
        with phase("begin_weights"):
            await self._reception.begin()

    async def load_weights(self, loads: list[Load]) -> None:
        """Receive buckets of the hand-over."""
        with phase("load_weights"):
            await self._reception.load(loads)

    async def close_weights(self, sent: dict[str, str]) -> None:
        """Compare the checksums of what was sent, and take the version."""
        with phase("end_weights"):
            await self._reception.close(sent)
        self._held.release()

    async def sleep(self) -> None:
        """Release what the engine can release."""
        await self._engine.sleep()

    async def wake_weights(self) -> None:
        """Take back the memory of the weights."""
        await self._engine.wake_weights()

    async def wake_cache(self) -> None:
        """Take back the rest."""
        await self._engine.wake_cache()

    async def stop(self) -> None:
        """End the engine."""
        if self._engine_made:
            await asyncio.wait_for(self._engine.stop(), timeout=5.0)


def _report(draw: Draw, request: GenerateRequest, output: GroupOutput) -> GroupReport:
    """Return the metadata of a group."""
    before = [response.sampled_tokens for response in request.begun] or [0] * request.num_samples
    new = [response.sampled_tokens - had for response, had in zip(output.responses, before, strict=True)]
    return GroupReport(
        progress=Progress(new_tokens=sum(new), longest_new=max(new), finished=_is_finished(output)),
        sequences=[
            SequenceInfo(
                sequence_id=sequence_id,
                group_id=draw.group_id,
                prompt_tokens=len(draw.prompt.tokens),
                response_tokens=len(response.tokens),
                finish_reason=response.finish_reason.value,
                policy_version=min((span.version for span in response.versions), default=output.policy_version),
                row=draw.prompt.row,
                observation_tokens=len(response.tokens) - response.sampled_tokens,
                counts=response.notes.counts if response.notes else {},
            )
            for sequence_id, response in zip(draw.sequence_ids, output.responses, strict=True)
        ],
    )


def _is_finished(output: GroupOutput) -> bool:
    return all(response.finish_reason is not FinishReason.abort for response in output.responses)


def _tokens(draw: Draw, output: GroupOutput) -> RolloutBatch | list[SampledResponse]:
    """Return a finished group as a batch, one that was aborted as its responses so far."""
    if not _is_finished(output):
        return output.responses
    prompt, responses = draw.prompt.tokens, output.responses
    mask = [sampled for response in responses for sampled in (*[False] * len(prompt), *response.mask)]
    batch = RolloutBatch(
        offsets=offsets_of([len(prompt) + len(response.tokens) for response in responses]),
        tokens=np.array([token for response in responses for token in (*prompt, *response.tokens)], dtype=np.int32),
        response_mask=np.array(mask, dtype=np.bool_),
        rollout_log_probs=np.array(
            [value for response in responses for value in (*(0.0,) * len(prompt), *response.log_probs)],
            dtype=np.float32,
        ),
        sequence_ids=np.array(draw.sequence_ids, dtype=np.int64),
        group_ids=np.full(len(responses), draw.group_id, dtype=np.int64),
    )
    batch.validate()
    return batch
