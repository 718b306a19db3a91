"""What the driver needs to know of the rollout program before Ray starts: that it can be made, and what prompts show of
its tools."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from megappo.config.rollout import SINGLE_TURN, RolloutConfig
from megappo.errors import DataError, MegappoError


def tools_to_show(config: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]] | None:
    """Make the program once, so that its faults show here; return the schemas of the tools that prompts show (Any: JSON
    schemas), None where they show none.

    Raises:
        DataError: the program cannot be made, or its tools, their format or the chat template cannot be used.
        RegistryError: there is no such program, tool or format.
    """
    if config.agent == SINGLE_TURN:
        return None
    from megappo.rollout.agents import AGENTS
    from megappo.rollout.agents.program import AgentSpec
    from megappo.rollout.agents.tool_loop import ToolLoop

    spec, make = AgentSpec(config=config, tokenizer=tokenizer), AGENTS.get(config.agent)
    try:
        program = make(spec)
    except MegappoError:
        raise
    except Exception as error:  # code of a user: the boundary of his part and ours
        raise DataError(
            f"rollout.agent={config.agent} cannot be made: {type(error).__name__}: {error} (it is called with an "
            "AgentSpec and returns a program)"
        ) from error
    if not callable(getattr(program, "run", None)):
        raise DataError(f"rollout.agent={config.agent} is no program: it needs `async def run(task, generate)`")
    return program.shown_tools() if isinstance(program, ToolLoop) else None
