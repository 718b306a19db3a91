"""The port of a rollout program: it makes one sample of calls to the engine, token ids in and token ids out.

A program never turns text that the model has written into tokens again: it hands over all tokens so far, those of the
engine as the engine gave them, and new ones of its own behind them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from megappo.config.rollout import RolloutConfig
from megappo.data.types import Prompt
from megappo.errors import RequestError
from megappo.rollout.engine import FinishReason


class ProgramError(RequestError):
    """A rollout program raised an error or broke the rules of its port; names the program and the data row."""


class OutOfTokens(Exception):
    """Raised by `generate` when `max_new_tokens` leaves no room for what the program adds and one sampled token. A
    program may let it pass: its sample then ends by length with what it has."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampled:
    """What one call to the engine sampled."""

    tokens: list[int]
    """The end token included."""
    log_probs: list[float]
    finish_reason: FinishReason
    """stop, or length: no further call will sample anything."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AgentTask:
    """One sample to be made."""

    prompt: Prompt
    number: int
    """Number of the sample among those of its prompt."""
    spent_s: float = 0.0
    """Time that earlier runs of the program have spent on this sample, before they were interrupted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AgentResult:
    """How a program ended its sample."""

    finish_reason: FinishReason | None = None
    """None: that of the last call; length where a limit of the program has cut the sample short."""
    # Any: whatever the reward understands.
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Goes to the reward, beside the columns of the data row, over those of the same name."""
    counts: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers by name; their means over sequences become the metrics `rollout/agent/<name>/mean`."""


class Generate(Protocol):
    """One call to the engine."""

    async def __call__(self, token_ids: Sequence[int], /) -> Sampled:
        """Sample what follows `token_ids`: those of the call before (first: the prompt), what it sampled, and then
        whatever the program adds. One call at a time.

        Raises:
            OutOfTokens: there is no room left.
            ProgramError: `token_ids` does not begin with what there was.
        """
        ...


class RolloutProgram(Protocol):
    """Makes samples, many at a time: what one sample needs lives in `run`."""

    async def run(self, task: AgentTask, generate: Generate) -> AgentResult:
        """Make one sample.

        A run that is interrupted is cancelled, and repeated later: `generate` then answers from the record until that
        is used up, so that the same tokens come again, and what the program adds in between is taken from the record
        whatever it is this time.
        """
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class AgentSpec:
    """What a program is made from, once per engine."""

    config: RolloutConfig
    tokenizer: PreTrainedTokenizerBase


AgentFactory = Callable[[AgentSpec], RolloutProgram]
"""What a registry entry is: a program class, or a function that makes a program."""
