"""Programs over an engine without a model, interrupted and taken up again until they are done."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from megappo.cluster.begun_answers import open_begun, pack_begun
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.data.types import Prompt
from megappo.rollout.agents.program import AgentResult, AgentTask, Generate
from megappo.rollout.agents.runner import AgentRunner
from megappo.rollout.engine import FinishReason, GenerateRequest, GroupOutput

Script = Callable[[AgentTask, Generate], Awaitable[AgentResult]]


class Program:
    """A program out of a function."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def run(self, task: AgentTask, generate: Generate) -> AgentResult:
        return await self._script(task, generate)


def request_of(group_id: int, prompt: Sequence[int], *, num_samples: int = 2) -> GenerateRequest:
    return GenerateRequest(group_id=group_id, prompt_tokens=list(prompt), num_samples=num_samples, row=group_id)


def prompt_of(request: GenerateRequest) -> Prompt:
    return Prompt(row=request.group_id, text="", tokens=request.prompt_tokens, answer=None, source="made")


def make_runner(engine: Any, script: Script, **settings: Any) -> AgentRunner:
    return AgentRunner(engine, Program(script), RolloutConfig(agent="tests:Program", **settings))


async def generate(
    runner: AgentRunner, requests: Sequence[GenerateRequest], sampling: SamplingConfig, *, seed: int = 0
) -> list[GroupOutput]:
    """Return all groups, by group id."""
    stream = runner.generate(requests, [prompt_of(request) for request in requests], sampling, seed=seed)
    return sorted([output async for output in stream], key=lambda output: output.group_id)


def is_finished(output: GroupOutput) -> bool:
    return all(response.finish_reason is not FinishReason.abort for response in output.responses)


async def generate_with_interruptions(
    runner: AgentRunner, requests: Sequence[GenerateRequest], sampling: SamplingConfig, numbers: random.Random
) -> list[GroupOutput]:
    """Abort after a while, again and again, and go on with what there is; every second time out of a checkpoint."""
    done: list[GroupOutput] = []
    left = list(requests)
    while left:
        call = asyncio.create_task(generate(runner, left, sampling))
        for _ in range(numbers.randrange(1, 40)):
            await asyncio.sleep(0)
        await runner.abort()
        outputs = await asyncio.wait_for(call, 20.0)
        done += [output for output in outputs if is_finished(output)]
        begun = {output.group_id: output.responses for output in outputs if not is_finished(output)}
        if numbers.random() < 0.5:
            packed = pack_begun({group: (range(len(found)), found) for group, found in begun.items()})
            begun = {group: found for group, (_, found) in open_begun(packed).items()}
        left = [replace(request, begun=begun[request.group_id]) for request in left if request.group_id in begun]
    return sorted(done, key=lambda output: output.group_id)
