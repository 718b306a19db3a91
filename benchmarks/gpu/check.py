"""What a check says."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class Check:
    """One comparison: the largest difference that was found and the largest that is allowed."""

    name: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is a number within the tolerance."""
        return self.difference <= self.tolerance


class SkippedError(Exception):
    """A part cannot be checked here; says why."""
