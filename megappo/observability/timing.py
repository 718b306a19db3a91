"""Wall-clock time of the phases of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megappo.observability.metrics import Metrics, total
from megappo.observability.phases import phase


class PhaseTimer:
    """Adds up the seconds of named phases; phases may nest, and one that runs twice counts twice.

    Example:
        timer = PhaseTimer()
        with timer.phase("generate"):
            ...
        timer.metrics()  # {"timing/generate_s": ...}
    """

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        """`before` is called as each phase begins; what it raises ends the phase before it began."""
        self._before = before
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; it counts when it raises, too."""
        if self._before is not None:
            self._before()
        start = time.perf_counter()
        try:
            with phase(name):
                yield
        finally:
            self._seconds[name] = self.seconds(name) + time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """Return the seconds spent in a phase so far; 0 for one that never ran."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> Metrics:
        """Return `timing/<phase>_s` of every phase that ran."""
        return {f"timing/{name}_s": total(seconds) for name, seconds in self._seconds.items()}
