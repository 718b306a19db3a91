"""TensorBoard as a tracker: event files in `<run>/tensorboard/`, in TensorBoard's own format (no torch).

A run that is resumed drops what is there of the steps after its checkpoint as TensorBoard does it: a new file that
begins with SessionLog.START at the first step that comes again, which readers take as the end of everything from there
on. All scalars of a step are one event, so a step is there or is not.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import WALL_TIME, Row
from megappo.observability.tracker_spec import TrackerSpec

_TABLE_ROWS = 50
"""Rows of a table of answers; more make a page that no browser likes."""
_FILES = "events.out.tfevents.*"
_CONFIG = "config"
"""Tag of the table of the configuration."""


class TensorBoardTracker:
    """Scalars by step, and tables as text."""

    def __init__(self, spec: TrackerSpec) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder = spec.directory.path / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        # Any: modules that protobuf makes when they are imported, so that no checker knows what is in them
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._known, self._has_config = self._read()
        self._file = self._next_file().open("xb")
        self._writer = RecordWriter(self._file)
        self._write(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _next_file(self) -> Path:
        """Return a new file that readers, who go by the names, take last."""
        stamps = [int(path.name.split(".")[3]) for path in self._folder.glob(_FILES)]
        stamp = max([int(time.time()), *(earlier + 1 for earlier in stamps)])
        return self._folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"

    def catch_up(self, files: RunFiles) -> int:
        """Write the lines that the folder lacks; see the port."""
        lines = files.lines()
        last = lines[-1][0] if lines else -1
        if any(step > last for step in self._known):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(self._events.Event(step=last + 1, wall_time=time.time(), session_log=start))
        parameters = files.parameters()
        if parameters and not self._has_config:
            self._text(_CONFIG, 0, [{"key": key, "value": value} for key, value in parameters.items()])
        for step, values in lines:
            if step not in self._known:
                self._scalars(step, values)
        tables = [table for table in files.tables() if table.step not in self._known]
        for table in tables:
            self.table(table.name, table.rows)
        self._file.flush()
        return last

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._scalars(step, values)
        # A run that is killed has its finished steps here.
        self._file.flush()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        found = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != WALL_TIME
        ]
        at = values.get(WALL_TIME, time.time())
        self._write(self._events.Event(step=step, wall_time=at, summary=self._summaries.Summary(value=found)))

    def artifact(self, path: Path) -> None:
        """Nothing to do: TensorBoard shows no files."""

    def table(self, name: str, rows: Sequence[Row]) -> None:
        tag, _, step = name.partition("/step_")
        self._text(tag, int(step or 0), rows[:_TABLE_ROWS])
        self._file.flush()

    def _text(self, tag: str, step: int, rows: Sequence[Row]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        if rows:
            summary = text_pb(tag, _markdown(rows))
            self._write(self._events.Event(step=step, wall_time=time.time(), summary=summary))

    def _write(self, event: Any) -> None:  # Any: a message of protobuf, which is imported late
        self._writer.write(event.SerializeToString())

    def _read(self) -> tuple[set[int], bool]:
        """Return the steps whose lines the folder holds, and whether it holds the configuration."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        steps: set[int] = set()
        has_config = False
        for path in sorted(self._folder.glob(_FILES)):
            for record in RawEventFileLoader(str(path)).Load():
                event = self._events.Event.FromString(record)
                if event.HasField("session_log"):
                    steps = {step for step in steps if step < event.step}
                if any(value.HasField("simple_value") for value in event.summary.value):
                    steps.add(event.step)
                has_config = has_config or any(value.tag == _CONFIG for value in event.summary.value)
        return steps, has_config

    def close(self, status: str) -> None:
        self._file.close()


def _markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table of Markdown, which TensorBoard renders."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
