"""What every registered program must do: end, and come to the same however often it is interrupted."""

import asyncio
import random

import pytest

from megappo.config.rollout import RolloutConfig, SamplingConfig, ToolLoopConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.rollout.agents import AGENTS
from megappo.rollout.agents.program import AgentSpec
from megappo.rollout.agents.runner import AgentRunner
from megappo.rollout.engine import FinishReason
from tests.fakes.token_engine import TokenEngine
from tests.rollout.agents.conftest import generate, generate_with_interruptions, request_of

CONFIG = RolloutConfig(tool_loop=ToolLoopConfig(tools=["tests.rollout.agents.sample_tools:add"], show_tools=False))
SPEC = AgentSpec(config=CONFIG, tokenizer=character_tokenizer(map(chr, range(60, 125))))
SAMPLING = SamplingConfig(max_new_tokens=20)


@pytest.mark.parametrize("name", AGENTS.names())
@pytest.mark.parametrize("at_once", [None, 8])
def test_a_program_ends_with_the_same_tokens_whatever_interrupts_it(name: str, at_once: int | None) -> None:
    requests = [request_of(group, [5, 6 + group], num_samples=2) for group in range(3)]
    runners = [AgentRunner(TokenEngine(at_once=at_once), AGENTS.get(name)(SPEC), CONFIG) for _ in range(2)]
    straight = asyncio.run(generate(runners[0], requests, SAMPLING))
    broken = asyncio.run(generate_with_interruptions(runners[1], requests, SAMPLING, random.Random(3)))
    for output, other in zip(straight, broken, strict=True):
        for response, again in zip(output.responses, other.responses, strict=True):
            assert response.finish_reason is not FinishReason.abort and response.mask[-1]
            assert (response.tokens, response.turns, response.notes) == (again.tokens, again.turns, again.notes)
