"""The record of a run as its folder holds it: what a tracker that was away reads to catch up.

The folder is the source: metrics.jsonl, the answers to validation prompts, the configuration and the summary are on
disk before a tracker hears of them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megappo.observability.run_directory import RunDirectory
from megappo.observability.tracker import Line, Row, lines_until

EVALUATION, GENERATIONS = "evaluation.json", "generations.jsonl"
"""Files of `megappo evaluate`: numbers and answers."""
_TABLE_ROWS = 1000
"""Answers of an evaluation that trackers get; the file has all of them."""
_COLUMNS = ("set", "source", "row", "prompt", "response", "answer", "score", "finish_reason", "response_tokens")


class Table(NamedTuple):
    """Answers to validation prompts."""

    name: str
    step: int
    rows: list[Row]


@dataclass(slots=True, frozen=True)
class RunFiles:
    """Reads the folder of one run."""

    directory: RunDirectory

    def lines(self) -> list[Line]:
        """Return the whole lines of metrics.jsonl."""
        return lines_until(self.directory.metrics)

    def tables(self) -> Iterator[Table]:
        """Yield the answers that the run has kept, oldest first."""
        for path in sorted(self.directory.generations.glob("step_*.jsonl")):
            step = int(path.stem.removeprefix("step_"))
            yield Table(f"generations/{path.stem}", step, _read_table(path))
        if (path := self.directory.path / GENERATIONS).exists():
            yield Table("generations", 0, _read_table(path))

    def files(self) -> list[Path]:
        """Return the files that a tracker keeps copies of, as far as they are there."""
        directory = self.directory
        wanted = (directory.config, directory.curve, directory.summary, directory.path / EVALUATION)
        return [path for path in wanted if path.exists()]

    def parameters(self) -> dict[str, str]:
        """Return the resolved configuration: dotted key -> value as YAML writes it; nothing before it is written."""
        path = self.directory.config
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
        return dict(_flattened(tree or {}))

    def exit_reason(self) -> str | None:
        """Return how the run ended, as its summary says; None: it has none."""
        if not self.directory.summary.exists():
            return None
        return str(json.loads(self.directory.summary.read_text(encoding="utf-8")).get("exit"))


def tracker_status(exit_reason: str | None) -> str:
    """Return what trackers call a run that ended so; None: it was killed."""
    return {"completed": "finished", "interrupted": "interrupted"}.get(exit_reason or "", "failed")


def table_rows(lines: Iterable[Mapping[str, Any]]) -> list[Row]:  # Any: JSON
    """Return the rows of a tracker's table: the first answers, and of each what fits into columns."""
    return [{column: line.get(column) for column in _COLUMNS} for line in islice(lines, _TABLE_ROWS)]


def _read_table(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return table_rows(json.loads(line) for line in file)


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:  # Any: YAML
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=1_000_000)
            yield f"{prefix}{key}", text.removesuffix("\n").removesuffix("\n...")
