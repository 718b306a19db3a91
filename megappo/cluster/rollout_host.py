"""One rollout engine in a process of its own, and the sampled tokens it keeps until they are packed."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megappo.batch.fields import offsets_of
from megappo.batch.stages import RolloutBatch
from megappo.cluster.runtime import describe_process
from megappo.config.cluster import DeviceKind
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Draw, SequenceInfo
from megappo.observability.logging import redirect_process_output
from megappo.rewards.types import Sample
from megappo.rollout.engine import EngineSpec, GenerateRequest, GroupOutput, RolloutEngine, WeightGroup
from megappo.weight_sync.push import StageSource, push_weights


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
class _Stored:
    """A sampled sequence as its engine returned it."""

    group_id: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float]


class RolloutHost:
    """Ray actor body: starts the engine, generates, keeps tokens, receives weights. All methods are coroutines."""

    def __init__(self, spec: HostSpec, config: RunConfig) -> None:
        redirect_process_output(spec.log_path)
        if spec.visible_devices:
            # Ray shows this process one device; an engine over several bundles needs them all.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_devices)
        self.spec = spec
        self.config = config
        self._engine_made = False
        self._stored: dict[int, _Stored] = {}

    async def start(self) -> None:
        """Load the tokenizer and start the engine; returns when it answers."""
        from megappo.data.tokenizer import load_tokenizer
        from megappo.rollout import ENGINES

        self._tokenizer = load_tokenizer(self.config.model.path)
        self._engine: RolloutEngine = ENGINES.get(self.config.rollout.engine)(
            EngineSpec(
                config=self.config.rollout,
                model=self.config.model,
                device=self.spec.device,
                index=self.spec.index,
                seed=self.config.seed,
                log_path=self.spec.engine_log_path,
                weight_timeout_s=self.config.weight_sync.timeout_s,
            )
        )
        self._engine_made = True
        await self._engine.start()

    async def identity(self) -> str:
        """Return where this process runs."""
        return describe_process()

    async def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, seed: int
    ) -> AsyncIterator[list[SequenceInfo] | list[Sample]]:
        """Yield two objects per finished group: its metadata, then its texts. The tokens stay here.

        Two objects, so that the driver reads one and passes the other on unread; a reference inside a streamed
        object would be freed before the driver sees it.
        """
        by_group = {draw.group_id: draw for draw in draws}
        requests = [
            GenerateRequest(
                group_id=draw.group_id,
                prompt_tokens=draw.prompt.tokens,
                num_samples=len(draw.sequence_ids),
                greedy=draw.greedy,
            )
            for draw in draws
        ]
        async for output in self._engine.generate(requests, sampling, seed=seed):
            sequences, samples = self._finish(by_group[output.group_id], output)
            yield sequences
            yield samples

    def _finish(self, draw: Draw, output: GroupOutput) -> tuple[list[SequenceInfo], list[Sample]]:
        """Keep the tokens of a finished group; returns its metadata and its texts."""
        from megappo.data.tokenizer import decode_response

        sequences: list[SequenceInfo] = []
        samples: list[Sample] = []
        for sequence_id, response in zip(draw.sequence_ids, output.responses, strict=True):
            self._stored[sequence_id] = _Stored(
                group_id=draw.group_id,
                prompt=draw.prompt.tokens,
                response=response.tokens,
                log_probs=response.log_probs,
            )
            sequences.append(
                SequenceInfo(
                    sequence_id=sequence_id,
                    group_id=draw.group_id,
                    prompt_tokens=len(draw.prompt.tokens),
                    response_tokens=len(response.tokens),
                    finish_reason=response.finish_reason.value,
                    policy_version=output.policy_version,
                    row=draw.prompt.row,
                )
            )
            samples.append(
                Sample(
                    prompt=draw.prompt.text,
                    response=decode_response(self._tokenizer, response.tokens),
                    answer=draw.prompt.answer,
                    finish_reason=response.finish_reason.value,
                    source=draw.prompt.source,
                    extra=draw.prompt.extra,
                )
            )
        return sequences, samples

    async def pack(self, shards: list[list[int]], forget: list[int]) -> list[Any]:
        """Put this engine's part of every shard into the object store (None where it has none); forget those sequences
        and those to forget."""
        pieces = []
        for wanted in shards:
            mine = [sequence_id for sequence_id in wanted if sequence_id in self._stored]
            pieces.append(ray.put(self._pack(mine)) if mine else None)
        for sequence_id in (*forget, *(sequence_id for shard in shards for sequence_id in shard)):
            self._stored.pop(sequence_id, None)
        return pieces

    def _pack(self, sequence_ids: list[int]) -> RolloutBatch:
        stored = [self._stored[sequence_id] for sequence_id in sequence_ids]
        tokens = [token for sequence in stored for token in (*sequence.prompt, *sequence.response)]
        log_probs = [value for sequence in stored for value in (*(0.0,) * len(sequence.prompt), *sequence.log_probs)]
        parts = [length for sequence in stored for length in (len(sequence.prompt), len(sequence.response))]
        batch = RolloutBatch(
            offsets=offsets_of([len(sequence.prompt) + len(sequence.response) for sequence in stored]),
            tokens=np.array(tokens, dtype=np.int32),
            response_mask=np.repeat(np.tile(np.array([False, True]), len(stored)), parts),
            rollout_log_probs=np.array(log_probs, dtype=np.float32),
            sequence_ids=np.array(sequence_ids, dtype=np.int64),
            group_ids=np.array([sequence.group_id for sequence in stored], dtype=np.int64),
        )
        batch.validate()
        return batch

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Join the weight group of one pipeline stage."""
        await self._engine.join_weight_group(group)

    async def receive_weights(self, stages: list[StageSource], version: int) -> None:
        """Receive all buckets of all stages as `version`."""
        await push_weights([self._engine], stages, version, timeout_s=self.config.weight_sync.timeout_s)

    async def sleep(self) -> None:
        """Release what the engine can release."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take it back."""
        await self._engine.wake()

    async def stop(self) -> None:
        """End the engine."""
        if self._engine_made:
            await asyncio.wait_for(self._engine.stop(), timeout=5.0)
