"""Signals of a launch: counted on every node, so that the controller gets each once, however many nodes get it.

Slurm and `scancel` send a signal to all nodes, Ctrl-C and `kill` to one. So node 0 passes a signal on as often as the
node that got it most often: two presses of Ctrl-C are two, one scancel on a hundred nodes is one.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = {signal.SIGINT.name, signal.SIGTERM.name, signal.SIGUSR1.name}
"""What ends a launch that has no controller yet."""


class SignalCounts:
    """Counts the signals of this process from now on; it does not end by them. Used from the main thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._parent = os.getppid()
        for number in PASSED_ON:
            signal.signal(number, self._receive)
        # The terminal is gone: the run gets to save, as with SIGTERM.
        signal.signal(signal.SIGHUP, lambda _number, _frame: self._add(signal.SIGTERM))

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._add(signal.Signals(number))

    def _add(self, number: signal.Signals) -> None:
        self.counts[number.name] += 1

    def look_at_parent(self) -> None:
        """Take the end of what started this process (a killed torchrun, a closed shell) for SIGTERM."""
        if self._parent != (parent := os.getppid()):
            self._parent = parent
            self._add(signal.SIGTERM)

    @property
    def asked_to_end(self) -> bool:
        """Whether one of those came that end a command."""
        return any(self.counts[name] for name in _ENDING)


def still_to_pass_on(of_nodes: Iterable[Mapping[str, int]], passed: Mapping[str, int]) -> list[signal.Signals]:
    """Return the signals that the controller has not had, given what each node has counted."""
    wanted: Counter[str] = Counter()
    for counts in of_nodes:
        wanted |= Counter(counts)
    return [signal.Signals[name] for name in sorted(wanted) for _ in range(wanted[name] - passed.get(name, 0))]
