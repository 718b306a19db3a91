"""What the loop remembers between steps."""

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class DrawIds:
    """Ids that no draw has used yet."""

    next_group_id: int = 0
    """Group ids are fresh per draw: two draws of one row are two groups."""
    next_sequence_id: int = 0

    def take_group_id(self) -> int:
        """Return an unused group id."""
        self.next_group_id += 1
        return self.next_group_id - 1

    def take_sequence_ids(self, count: int) -> list[int]:
        """Return `count` unused sequence ids."""
        self.next_sequence_id += count
        return list(range(self.next_sequence_id - count, self.next_sequence_id))


@dataclass(kw_only=True, slots=True, frozen=True)
class OpenDraw:
    """A draw that no step has trained on or dropped: its answers are unfinished, or wait for a later step."""

    row: int
    group_id: int
    sequence_ids: list[int]
    origin: str = ""
    """Of the prompt: its source among several."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DrawPosition:
    """Where drawing goes on: with the open draws, then with what the sampler gives next."""

    next_group_id: int
    next_sequence_id: int
    # Any: what PromptSampler.state_dict returns, plain numbers and strings.
    sampler: dict[str, Any]
    open_draws: list[OpenDraw]
