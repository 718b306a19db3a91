"""When a run that failed is started again by itself."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class RestartConfig:
    """A run whose processes die or stop answering can be started again from its newest checkpoint."""

    max: int = 0
    """Most restarts in a row without a new checkpoint; 0: a run that fails has ended."""
    wait_s: float = 10.0
    """Wait before a restart, for a node to come back or a port to be free; it doubles while no new checkpoint comes."""
