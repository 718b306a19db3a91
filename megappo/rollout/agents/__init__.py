"""Rollout programs: what makes one sample out of several calls to the engine.

Owns: the port (`program`), the record of a sample (`session`), the runner that drives programs beside the engine
(`runner`) and the programs that are shipped. Must not import ray, megatron or train. To add a program: write a class
with `async def run(task, generate)` and a constructor that takes an `AgentSpec`, and register it here (or name it
`package.module:Class`); the contract test in tests/rollout/agents runs over the registry.
"""

from megappo.registry import Registry
from megappo.rollout.agents.program import AgentFactory, AgentSpec, RolloutProgram
from megappo.rollout.agents.single_turn import SingleTurn


def _tool_loop(spec: AgentSpec) -> RolloutProgram:
    from megappo.rollout.agents.tool_loop import ToolLoop

    return ToolLoop(spec)


AGENTS: Registry[AgentFactory] = Registry("rollout program")
"""Programs by name."""
AGENTS.register("single_turn", SingleTurn)
AGENTS.register("tool_loop", _tool_loop)
