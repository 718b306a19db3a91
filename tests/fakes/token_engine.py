"""An engine in this process that needs no model: the token at a place of a sample is a function of the place, so that
whoever goes on with a sample gets what would have followed. It notes what it was given and what it gave."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from megappo.config.rollout import SamplingConfig
from megappo.rollout.continuation import OpenSample, join_group, open_samples
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput, SampledResponse, VersionSpan

END = 1
"""The token that ends a call."""


@dataclass(kw_only=True)
class Drawn:
    """What one call gave one sample."""

    group_id: int
    sample: int
    read: list[int]
    """Everything that the model would have read: the prompt and what there was behind it."""
    tokens: list[int]
    log_probs: list[float]


@dataclass
class TokenEngine:
    """See the module. `at_once` as in `RolloutEngine`; a token takes a turn of the event loop."""

    at_once: int | None = None
    end_share: float = 0.2
    """Share of the tokens that end a call."""
    version: int = 1
    drawn: list[Drawn] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """Samples that each call has drawn for."""
    aborts: int = 0

    def token(self, seed: int, group_id: int, sample: int, place: int) -> int:
        numbers = random.Random(hash((seed, group_id, sample, place)))
        return END if numbers.random() < self.end_share else numbers.randrange(2, 50)

    async def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int
    ) -> AsyncIterator[GroupOutput]:
        jobs = [(request, open_samples(request, sampling.max_new_tokens)) for request in requests]
        self.batches.append(sum(len(samples) for _, samples in jobs))
        tasks = [asyncio.create_task(self._answer(request, samples, sampling, seed)) for request, samples in jobs]
        for finished in asyncio.as_completed(tasks):
            yield await finished

    async def _answer(
        self, request: GenerateRequest, samples: list[OpenSample], sampling: SamplingConfig, seed: int
    ) -> GroupOutput:
        found = await asyncio.gather(*(self._draw(request, sample, seed) for sample in samples))
        drawn = {sample.sample: response for sample, response in zip(samples, found)}
        return join_group(request, drawn, max_new_tokens=sampling.max_new_tokens, version_in_use=self.version)

    async def _draw(self, request: GenerateRequest, sample: OpenSample, seed: int) -> SampledResponse:
        aborts, tokens, log_probs = self.aborts, list[int](), list[float]()
        reason = FinishReason.length
        while len(tokens) < sample.budget:
            await asyncio.sleep(0)
            if self.aborts > aborts:
                reason = FinishReason.abort
                break
            place = len(sample.begun) + len(tokens)
            tokens.append(self.token(seed, request.group_id, sample.sample, place))
            log_probs.append(-(1 + place) / 64)
            if tokens[-1] == END:
                reason = FinishReason.stop
                break
        self.drawn.append(
            Drawn(
                group_id=request.group_id,
                sample=sample.sample,
                read=[*request.prompt_tokens, *sample.begun],
                tokens=tokens,
                log_probs=log_probs,
            )
        )
        spans = [VersionSpan(version=self.version, tokens=len(tokens))]
        return SampledResponse(tokens=tokens, log_probs=log_probs, finish_reason=reason, versions=spans)

    async def abort(self) -> None:
        self.aborts += 1

    async def weight_version(self) -> int:
        return self.version
