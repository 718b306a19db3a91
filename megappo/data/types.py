"""A row of a source, and a prompt ready for generation."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # Any: content may be text or parts, tool calls are nested
"""One chat message: role, content and what else the chat template knows."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One data row as a source gives it."""

    row: int
    """Row number in the source, rows left out included."""
    question: str | list[Message]
    """The user's text, or the conversation up to the answer."""
    answer: str | None
    source: str = ""
    """Under which metrics and rewards know it; empty: `read_source` names it by the configuration."""
    # Any: the other columns.
    extra: dict[str, Any] = field(default_factory=dict)
    # Any: JSON schemas.
    tools: list[dict[str, Any]] | None = None
    """Tool schemas, handed to the chat template."""

    @property
    def text(self) -> str:
        """The question, or the text contents of the messages joined by blank lines."""
        if isinstance(self.question, str):
            return self.question
        return "\n\n".join(message["content"] for message in self.question if isinstance(message.get("content"), str))


@dataclass(kw_only=True, slots=True, frozen=True)
class LeftOut:
    """A row that cannot be used, or should not be."""

    row: int
    """Row number in the source."""
    reason: str
    """One word under which it is counted, such as `null` or `too_long`."""
    message: str
    """File and line where there is one, what is wrong, and with what."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One data row, rendered and tokenised."""

    row: int
    """Row number in the source."""
    text: str
    """Rendered by the chat template, generation prompt included."""
    tokens: list[int]
    answer: str | None
    source: str
    # Any: extra columns of the row, handed to the reward.
    extra: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    """Tool schemas that the text shows; None: none."""
    reward: str = ""
    """Key of the source whose reward scores the answers, such as `data.train_sources.math`; empty: the run's."""
    origin: str = ""
    """Name in `data.train_sources`; empty where there is one source."""
