"""The model calls tools and reads their answers, until it writes a turn without a call."""

import asyncio
from dataclasses import dataclass
from typing import Any

from megappo.data.tokenizer import decode_response
from megappo.rollout.agents.observations import Observations, require_shown
from megappo.rollout.agents.program import AgentResult, AgentSpec, AgentTask, Generate, OutOfTokens
from megappo.rollout.agents.tool_formats import TOOL_FORMATS
from megappo.rollout.agents.tools import Tool, ToolAnswer, ToolCall, answer_call, load_tools
from megappo.rollout.engine import FinishReason

LAST_TURN = "last_turn"
"""Key of the text of the last turn in what goes to the reward."""


class ToolLoop:
    """See the module; settings are `rollout.tool_loop`."""

    def __init__(self, spec: AgentSpec) -> None:
        """Raises DataError or RegistryError: tools, format or chat template cannot be used."""
        self._config = spec.config.tool_loop
        self._tokenizer = spec.tokenizer
        self._tools = load_tools(self._config.tools)
        self._read_calls = TOOL_FORMATS.get(self._config.format)
        self._observations = Observations(spec.tokenizer, max_tokens=self._config.max_observation_tokens)

    def shown_tools(self) -> list[dict[str, Any]] | None:  # Any: JSON schemas
        """Return the schemas that prompts show, None where they show none. Raises DataError: the chat template cannot
        show them."""
        if not self._config.show_tools:
            return None
        schemas = [tool.schema for tool in self._tools.values()]
        require_shown(self._tokenizer, schemas)
        return schemas

    async def run(self, task: AgentTask, generate: Generate) -> AgentResult:
        """Take turns. Too many of them, or too long, end the sample by length."""
        conversation = _Conversation()
        try:
            async with asyncio.timeout(max(0.0, self._config.timeout_s - task.spent_s)):
                is_cut = await self._take_turns(task, generate, conversation)
        except (TimeoutError, OutOfTokens):
            is_cut = True
        return AgentResult(
            finish_reason=FinishReason.length if is_cut else None,
            extra={LAST_TURN: conversation.last_turn},
            counts={"tool_calls": float(conversation.calls), "tool_errors": float(conversation.errors)},
        )

    async def _take_turns(self, task: AgentTask, generate: Generate, conversation: "_Conversation") -> bool:
        """Return whether the sample was cut short."""
        tools = self._tools_of(task)
        tokens = list(task.prompt.tokens)
        for turn in range(1, self._config.max_turns + 1):
            sampled = await generate(tokens)
            tokens += sampled.tokens
            conversation.last_turn = decode_response(self._tokenizer, sampled.tokens)
            calls = self._read_calls(conversation.last_turn)
            if sampled.finish_reason is FinishReason.length or not calls:
                return False
            if turn == self._config.max_turns:
                break
            answers = await self._answer(calls, tools)
            conversation.calls += len(answers)
            conversation.errors += sum(answer.failed for answer in answers)
            tokens += self._observations.tokens(sampled.tokens, answers)
        return True

    def _tools_of(self, task: AgentTask) -> dict[str, Tool]:
        """Return the tools of a sample: of a data row that brings some, those that it names."""
        if task.prompt.tools is None:
            return self._tools
        named = {schema.get("function", schema).get("name") for schema in task.prompt.tools}
        return {name: tool for name, tool in self._tools.items() if name in named}

    async def _answer(self, calls: list[ToolCall], tools: dict[str, Tool]) -> list[ToolAnswer]:
        """Run the calls of one turn beside each other."""
        timeout_s = self._config.tool_timeout_s
        return list(await asyncio.gather(*(answer_call(call, tools, timeout_s=timeout_s) for call in calls)))


@dataclass(slots=True)
class _Conversation:
    """What is known of a sample when it ends, in whatever way."""

    last_turn: str = ""
    calls: int = 0
    errors: int = 0
