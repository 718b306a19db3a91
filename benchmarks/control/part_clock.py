"""CPU seconds of this process by part, with gaps that count for nobody."""

import time


class PartClock:
    """Between two calls the time belongs to the part that the second one names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def end(self, part: str) -> None:
        """What was done since the last call was this part."""
        now = time.process_time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """What was done since the last call counts for nobody."""
        self._last = time.process_time()

    def take(self) -> dict[str, float]:
        """Return the parts since the last `take`."""
        found, self.seconds = self.seconds, {}
        return found
