"""A rollout program over scripted engines, named `tests.fakes.two_turns:TwoTurns` in rollout.agent."""

import asyncio

from megappo.rollout.agents.program import AgentResult, AgentSpec, AgentTask, Generate

ADDED = [60, 61]
"""What it puts between its turns."""


class TwoTurns:
    """Takes two turns and a pause between them."""

    def __init__(self, spec: AgentSpec) -> None: ...

    async def run(self, task: AgentTask, generate: Generate) -> AgentResult:
        first = await generate(task.prompt.tokens)
        await asyncio.sleep(0.02)
        await generate([*task.prompt.tokens, *first.tokens, *ADDED])
        return AgentResult(extra={"number": task.number}, counts={"pauses": 1.0})
