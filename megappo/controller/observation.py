"""The port of whoever looks at a step from outside: traces and profiles."""

from typing import Protocol

from megappo.observability.metrics import Metrics


class StepObservation(Protocol):
    """Hears of each step, and never ends the run."""

    def begin(self, step: int) -> None:
        """A step begins."""
        ...

    def end(self, step: int) -> Metrics:
        """It has ended, before validation; returns metrics of what was observed."""
        ...


class NoObservation:
    """Looks at nothing."""

    def begin(self, step: int) -> None:
        """Nothing to do."""

    def end(self, step: int) -> Metrics:
        """Nothing to tell."""
        return {}
