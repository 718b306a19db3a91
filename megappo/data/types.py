"""A prompt ready for generation."""

from dataclasses import dataclass, field
from typing import Any


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
