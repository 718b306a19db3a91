"""A rollout program that cannot be made is refused before Ray starts."""

import pytest

from megappo.cli.rollout_program import tools_to_show
from megappo.config.rollout import RolloutConfig, ToolLoopConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import DataError, MegappoError
from megappo.rollout.agents.program import AgentSpec

TOKENIZER = character_tokenizer("abc")


class Refuses:
    def __init__(self, spec: AgentSpec) -> None:
        raise ValueError("no settings")


class RefusesData:
    def __init__(self, spec: AgentSpec) -> None:
        raise DataError("its own words")


class NoSpec:
    async def run(self) -> None: ...


class NoRun:
    def __init__(self, spec: AgentSpec) -> None: ...


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Refuses",
            r"rollout\.agent=.*:Refuses cannot be made: ValueError: no settings \(it is called with",
        ),
        ("RefusesData", "^its own words$"),
        ("NoSpec", r":NoSpec cannot be made: TypeError: NoSpec\(\) takes no arguments"),
        ("NoRun", r"rollout\.agent=.*:NoRun is no program: it needs `async def run\(task, generate\)`"),
    ],
)
def test_a_program_that_cannot_be_made_is_named(name: str, message: str) -> None:
    with pytest.raises(MegappoError, match=message):
        tools_to_show(RolloutConfig(agent=f"{__name__}:{name}"), TOKENIZER)


def test_only_the_tool_loop_shows_tools() -> None:
    assert tools_to_show(RolloutConfig(), TOKENIZER) is None
    assert tools_to_show(RolloutConfig(agent="tests.fakes.two_turns:TwoTurns"), TOKENIZER) is None
    hidden = ToolLoopConfig(tools=["tests.rollout.agents.sample_tools:add"], show_tools=False)
    assert tools_to_show(RolloutConfig(agent="tool_loop", tool_loop=hidden), TOKENIZER) is None
