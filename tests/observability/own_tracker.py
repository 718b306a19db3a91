"""A tracker as somebody outside of the project writes one: a file of JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import Row
from megappo.observability.tracker_spec import TrackerSpec


class OwnTracker:
    """Keeps everything in `<run>/own.json`."""

    def __init__(self, spec: TrackerSpec) -> None:
        self._path = spec.directory.path / "own.json"
        empty: dict[str, Any] = {"points": {}, "tables": {}, "files": [], "status": None}
        self._kept = json.loads(self._path.read_text()) if self._path.exists() else empty

    def catch_up(self, files: RunFiles) -> int:
        lines = files.lines()
        self._kept["points"] = {str(step): values for step, values in lines}
        for table in files.tables():
            self.table(table.name, table.rows)
        for path in files.files():
            self.artifact(path)
        return lines[-1][0] if lines else -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._kept["points"][str(step)] = dict(values)
        self._write()

    def artifact(self, path: Path) -> None:
        self._kept["files"] = sorted({*self._kept["files"], path.name})
        self._write()

    def table(self, name: str, rows: Sequence[Row]) -> None:
        self._kept["tables"][name] = list(rows)
        self._write()

    def close(self, status: str) -> None:
        self._kept["status"] = status
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._kept))
