"""Rules about rollout programs."""

from megappo.config.rollout import SINGLE_TURN, ToolLoopConfig
from megappo.config.run import RunConfig
from megappo.errors import Violation

_TOOL_LOOP = "tool_loop"


def tool_loop_has_what_it_needs(config: RunConfig) -> list[Violation]:
    """There are tools, each named where it can be imported from, and limits that leave room to use them."""
    rollout, loop = config.rollout, config.rollout.tool_loop
    if rollout.agent != _TOOL_LOOP:
        return []
    violations = [
        _violation("tools", path, "is not the place of a function", "write package.module:function")
        for path in loop.tools
        if not all(path.partition(":"))
    ]
    if not loop.tools:
        remedy = f"name functions, package.module:function, or use rollout.agent={SINGLE_TURN}"
        violations.append(_violation("tools", loop.tools, "must name a tool", remedy))
    if loop.max_turns < 2:
        remedy = f"use 2 or more, or rollout.agent={SINGLE_TURN}"
        violations.append(_violation("max_turns", loop.max_turns, "leaves no turn after a call", remedy))
    tokens = min(rollout.sampling.max_new_tokens, rollout.validation.max_new_tokens)
    if loop.max_observation_tokens >= tokens:
        rule = f"must be less than max_new_tokens={tokens} of rollout.sampling and rollout.validation"
        remedy = "all turns and answers of a sample share those"
        violations.append(_violation("max_observation_tokens", loop.max_observation_tokens, rule, remedy))
    if loop.tool_timeout_s >= rollout.request_timeout_s:
        rule = f"must be less than rollout.request_timeout_s={rollout.request_timeout_s:g}"
        remedy = "samples are interrupted by then, and their tools called again"
        violations.append(_violation("tool_timeout_s", loop.tool_timeout_s, rule, remedy))
    return violations


def tools_have_a_program(config: RunConfig) -> list[Violation]:
    """Settings of the tool loop are there for it (a program from outside may read them, too)."""
    if config.rollout.agent != SINGLE_TURN or config.rollout.tool_loop == ToolLoopConfig():
        return []
    rule, remedy = "reads nothing of rollout.tool_loop", f"use rollout.agent={_TOOL_LOOP}"
    return [Violation(key="rollout.agent", value=config.rollout.agent, rule=rule, remedy=remedy)]


def _violation(key: str, value: object, rule: str, remedy: str) -> Violation:
    return Violation(key=f"rollout.tool_loop.{key}", value=value, rule=rule, remedy=remedy)
