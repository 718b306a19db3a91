"""Settings of rollout programs that could not be obeyed are refused."""

from typing import Any

import pytest

from megappo.config.rules import check_config
from megappo.config.run import RunConfig

TOOLS = ["package.tools:add"]


def keys_of(config: RunConfig, **settings: Any) -> list[str]:
    config.rollout.agent = settings.pop("agent", "tool_loop")
    for key, value in ({"tools": TOOLS, "max_observation_tokens": 1} | settings).items():
        setattr(config.rollout.tool_loop, key, value)
    return [violation.key.removeprefix("rollout.tool_loop.") for violation in check_config(config)]


@pytest.mark.parametrize(
    ("settings", "broken"),
    [
        ({}, []),
        ({"agent": "package.module:Mine", "tools": []}, []),
        ({"tools": []}, ["tools"]),
        ({"tools": ["add", "package.tools:", ":add"]}, ["tools"] * 3),
        ({"max_turns": 1}, ["max_turns"]),
        ({"max_turns": 0}, ["max_turns"] * 2),
        ({"max_observation_tokens": 4096}, ["max_observation_tokens"]),
        ({"tool_timeout_s": 300.0}, ["tool_timeout_s"]),
        ({"tool_timeout_s": 0.0}, ["tool_timeout_s"]),
        ({"timeout_s": 900.0}, []),
        ({"format": "hermed"}, ["format"]),
        ({"agent": "single_turn"}, ["rollout.agent"]),
        ({"agent": "tool_lop"}, ["rollout.agent"]),
    ],
)
def test_a_tool_loop_has_tools_and_limits_that_leave_room(
    config: RunConfig, settings: dict[str, Any], broken: list[str]
) -> None:
    assert keys_of(config, **settings) == broken


def test_defaults_of_the_loop_break_no_rule_for_runs_without_it(config: RunConfig) -> None:
    assert check_config(config) == []
