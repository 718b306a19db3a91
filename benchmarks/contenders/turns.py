"""A contender's side of taking turns: it waits for a line before each step, and tells a line of JSON after it."""

import json
import os
import sys
from typing import Any

MARK = "TURN "
"""Begins the lines that are told."""
STEP = "step"


class Turns:
    """Talks to the benchmark over what were standard input and output when it was made; other prints go to stderr."""

    def __init__(self) -> None:
        self._told = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def tell(self, report: dict[str, Any]) -> None:  # Any: JSON
        """Tell what was done."""
        self._told.write(MARK + json.dumps(report) + "\n")
        self._told.flush()

    def wait(self) -> None:
        """Wait for the turn. Raises SystemExit when the benchmark has ended."""
        if sys.stdin.readline().strip() != STEP:
            raise SystemExit(0)
