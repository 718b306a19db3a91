"""Clocks of several machines on one scale.

Processes of one machine share `time.monotonic_ns`. Of another machine the driver asks for the time, several times: the
clock was read between question and answer, so the middle of the shortest round trip is off by at most half of it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class ClockReading(NamedTuple):
    """The time of a machine."""

    machine: str
    """The same for all processes that share the clock: the identity of the running kernel."""
    now_ns: int


class Probe(NamedTuple):
    """One question for the time: when it was asked and answered here, and what was read there."""

    asked_ns: int
    read_ns: int
    answered_ns: int


class Offset(NamedTuple):
    """How far a clock is ahead of the driver's, and how far off that may be."""

    ahead_ns: int
    error_ns: int


def read_clock() -> ClockReading:
    """Return the time of this machine."""
    return ClockReading(_machine(), time.monotonic_ns())


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def offset_of(probes: Sequence[Probe]) -> Offset:
    """Return the offset that the shortest round trip tells."""
    best = min(probes, key=lambda probe: probe.answered_ns - probe.asked_ns)
    middle = (best.asked_ns + best.answered_ns) // 2
    return Offset(best.read_ns - middle, (best.answered_ns - best.asked_ns + 1) // 2)
