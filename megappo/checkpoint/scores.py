"""`scores.json`: the metric that decides which checkpoint is the best, and its value for each of them.

It lies beside the checkpoints since a step is measured, and validated, after it was saved. Values of another metric
are no help, so a run that goes on with another one begins with none.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.checkpoint.disk import replace_file
from megappo.checkpoint.names import SCORES


@dataclass(kw_only=True, slots=True)
class Scores:
    """Values of one metric by step."""

    metric: str
    values: dict[int, float] = field(default_factory=dict[int, float])

    def write(self, directory: Path) -> None:
        """Write them beside the checkpoints. Raises OSError."""
        steps = {str(step): value for step, value in sorted(self.values.items())}
        replace_file(directory / SCORES, json.dumps({"metric": self.metric, "steps": steps}, indent=1) + "\n")


def read_scores(directory: Path, metric: str) -> Scores:
    """Return the values of `metric`; none where the file is missing, damaged or of another metric."""
    found = _read(directory)
    return found if found is not None and found.metric == metric else Scores(metric=metric)


def forget_scores(directory: Path, *, after: int) -> None:
    """Drop the values of steps after `after`, which are to be made again. Raises OSError."""
    found = _read(directory)
    if found is not None and any(step > after for step in found.values):
        kept = {step: value for step, value in found.values.items() if step <= after}
        Scores(metric=found.metric, values=kept).write(directory)


def _read(directory: Path) -> Scores | None:
    """Return what the file holds; None where it is missing or damaged."""
    try:
        # Any: JSON
        content: dict[str, Any] = json.loads((directory / SCORES).read_text(encoding="utf-8"))
        values = {int(step): float(value) for step, value in content["steps"].items()}
        return Scores(metric=str(content["metric"]), values=values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
