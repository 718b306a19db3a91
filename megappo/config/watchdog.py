"""What is told, and done, when a run does not get on."""

from dataclasses import dataclass
from enum import Enum


class OnHang(Enum):
    """What becomes of a run when a wait of the driver exceeds its limit, such as cluster.call_timeout_s."""

    end = "end"
    """It ends with an error that names who is probably to blame."""
    wait = "wait"
    """It is told of, and waits as long again: to look at the processes with a debugger. Collectives of the trainers
    have no limit then. What recovers by itself (engines, rewards, a hand-over) does so all the same."""


@dataclass(kw_only=True, slots=True)
class WatchdogConfig:
    """The watchdog over the waits of a run; docs/hangs.md shows its reports."""

    warn_s: float | None = 600.0
    """A wait without news for so long is reported in logs/hang_<n>.txt and the run goes on; null: only at its limit."""
    on_hang: OnHang = OnHang.end
