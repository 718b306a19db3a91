"""One call to the engine: the answer to the prompt. A run with this program goes to the engine directly, with the same
result; as a class it is what other programs can start from."""

from megappo.rollout.agents.program import AgentResult, AgentSpec, AgentTask, Generate


class SingleTurn:
    """Answers once."""

    def __init__(self, spec: AgentSpec) -> None:
        """It has no settings."""

    async def run(self, task: AgentTask, generate: Generate) -> AgentResult:
        """Sample the answer."""
        await generate(task.prompt.tokens)
        return AgentResult()
