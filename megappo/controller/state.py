"""What the loop remembers between steps."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LoopState:
    """Counters of the loop; all of it is part of a checkpoint."""

    step: int = 0
    """Steps finished; also the version of the weights that the engines hold after the step."""
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
