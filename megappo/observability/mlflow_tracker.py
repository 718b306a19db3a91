"""MLflow as a tracker: a sqlite store in the run directory unless a server is named.

Metric names: MLflow admits letters, digits and `_ - . : /` and the space. Any other character becomes `_`, an empty
part of a path too (`a//b` -> `a/_/b`); a name that would then equal another one gets `_2`, `_3`, ... at its end.
metrics.jsonl keeps the names as they are.

A run that is resumed goes on with the MLflow run whose id is in its folder. No point is there twice: what the server
has already is not sent, and a point whose answer was lost is the same one when it is sent again, since it has the time
of its line (mlflow's SQL store drops equal points). MLflow deletes no number: of steps that a resumed run does again,
those that come out otherwise (`timing/`, `perf/`) are there with both values. Parameters are those that the run began
with; config.yaml among the artifacts is the newest.

mlflow is imported when a tracker is made: it takes seconds, which pass in the tracker's own thread.
"""

import logging
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.observability.run_directory import write_atomically
from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import WALL_TIME, Line, Row
from megappo.observability.tracker_spec import TrackerSpec

_REFUSED = re.compile(r"[^A-Za-z0-9_\-. :/]")
_LONGEST_NAME = 240
_METRICS_PER_CALL, _PARAMETERS_PER_CALL = 1000, 100
_LONGEST_PARAMETER = 6000
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_DEFAULTS = {
    # A training run on a private network should not call out.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Instead of 7, and 2 minutes each: `BackgroundTracker` tries again, and meanwhile the queue should not grow.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Of mlflow's own environment variables, where the user has set none."""


class MlflowTracker:
    """One MLflow run. Slow to open (a new database takes 6-15 s): wrap it in `BackgroundTracker`."""

    def __init__(self, spec: TrackerSpec) -> None:
        """Open the run of the folder, or make one and keep its id in the folder."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        # The creation of a database is told at level INFO, in the middle of the progress bar.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        directory = spec.directory
        uri = store_uri(spec.config.mlflow_uri, directory.database)
        self._client = MlflowClient(tracking_uri=uri)
        self._names = MetricNames()
        self._later: dict[str, set[tuple[int, float | None]]] = {}
        """By name in MLflow: points of steps that the run does again, which it has already."""
        found = self._open(directory.mlflow_run)
        self._is_new = found is None
        if found is None:
            # A sqlite store would put artifacts below the working directory.
            artifacts = (directory.path / "mlflow").resolve().as_uri() if uri.startswith("sqlite:") else None
            experiment = self._experiment(spec.config.experiment, artifacts)
            found = self._client.create_run(experiment, run_name=spec.run_name).info.run_id
            write_atomically(directory.mlflow_run, found + "\n")
        self._run_id = found

    def _open(self, id_file: Path) -> str | None:
        """Go on with the run whose id is in the file. None: there is none, or the store does not know it."""
        from mlflow.exceptions import MlflowException

        if not id_file.exists():
            return None
        run_id = id_file.read_text().strip()
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run_id

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(name, artifact_location=artifacts)

    def catch_up(self, files: RunFiles) -> int:
        """Send the points, tables and files that the run lacks; see the port."""
        self._send_parameters(files.parameters())
        lines = files.lines()
        lacking = [line for line in lines if line[1]] if self._is_new else self._lacking(lines)
        self._send(lacking)
        first_lacking = lacking[0][0] if lacking else math.inf
        complete = max((step for step, _ in lines if step < first_lacking), default=-1)
        known = set() if self._is_new else self._artifacts()
        for table in files.tables():
            # The table of a step is sent before its line: one of a later step may be of the time before a resume.
            if table.step > complete or _table_file(table.name) not in known:
                self.table(table.name, table.rows)
        for path in files.files():
            self.artifact(path)
        return lines[-1][0] if lines else -1

    def _send_parameters(self, parameters: Mapping[str, str]) -> None:
        """Record those that the run does not have: MLflow takes no other value for one that it has."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        lacking = [
            Param(name, value[:_LONGEST_PARAMETER])
            for name, value in ((_admitted(key), value) for key, value in parameters.items())
            if name not in known
        ]
        for start in range(0, len(lacking), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=lacking[start : start + _PARAMETERS_PER_CALL])

    def _lacking(self, lines: Sequence[Line]) -> list[Line]:
        """Return the points that the run does not have, by step, and remember those that it has of later steps."""
        last = lines[-1][0] if lines else -1
        for name in sorted({name for _, values in lines for name in values}):
            self._names.tracked(name)  # in one order, whatever the first line holds
        lacking: dict[int, dict[str, float]] = {step: {} for step, _ in lines}
        of_name: dict[str, list[tuple[int, str, float]]] = {}
        for step, values in lines:
            for name, value in values.items():
                of_name.setdefault(self._names.tracked(name), []).append((step, name, value))
        known = self._client.get_run(self._run_id).data.metrics
        for tracked in known.keys() | of_name.keys():
            points = self._points(tracked) if tracked in known else set()
            self._later[tracked] = {point for point in points if point[0] > last}
            steps = {step for step, _ in points}
            for step, name, value in of_name.get(tracked, ()):
                if name != WALL_TIME and step not in steps:
                    lacking[step][name] = value
        times = {step: values[WALL_TIME] for step, values in lines if WALL_TIME in values}
        return [
            (step, values | ({WALL_TIME: times[step]} if step in times else {}))
            for step, values in sorted(lacking.items())
            if values
        ]

    def _points(self, tracked: str) -> set[tuple[int, float | None]]:
        return {(point.step, _stored(point.value)) for point in self._client.get_metric_history(self._run_id, tracked)}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._send([(step, values)])

    # Any: entities of mlflow, which is imported late
    def _send(self, lines: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        points: list[Any] = []
        for step, values in lines:
            points += self._metrics(step, values)
        for start in range(0, len(points), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=points[start : start + _METRICS_PER_CALL])

    def _metrics(self, step: int, values: Mapping[str, float]) -> Iterator[Any]:  # Any: as in _send
        from mlflow.entities import Metric

        at_ms = int(values.get(WALL_TIME, time.time()) * 1000)
        for name, value in values.items():
            tracked = self._names.tracked(name)
            if name != WALL_TIME and (step, _stored(value)) not in self._later.get(tracked, ()):
                yield Metric(tracked, value, at_ms, step)

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def table(self, name: str, rows: Sequence[Row]) -> None:
        if not rows:
            return
        file = _table_file(name)
        if file in self._artifacts(file.rpartition("/")[0] or None):
            # log_table would add the rows to those that are there.
            content = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self._client.log_dict(self._run_id, content, file)
        else:
            columns = {column: [row[column] for row in rows] for column in rows[0]}
            self._client.log_table(self._run_id, columns, file)

    def _artifacts(self, folder: str | None = None) -> set[str]:
        """Return the artifacts in a folder; None: at the top, and tables below."""
        found = {file.path for file in self._client.list_artifacts(self._run_id, folder)}
        return found | self._artifacts("generations") if folder is None and "generations" in found else found

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[status])


def _table_file(name: str) -> str:
    return f"{_admitted(name)}.json"


def _stored(value: float) -> float | None:
    """Return what a store holds of a value: MLflow has no infinities, and NaN (None here) equals nothing."""
    if math.isnan(value):
        return None
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


class MetricNames:
    """Metric names that MLflow takes, one for each of ours, by the rule at the top of the module."""

    def __init__(self) -> None:
        self._tracked: dict[str, str] = {}

    def tracked(self, name: str) -> str:
        """Return the name used in MLflow; the same for the same name, different for different ones."""
        if name not in self._tracked:
            taken = set(self._tracked.values())
            base = _admitted(name)
            candidate, number = base, 1
            while candidate in taken:
                number += 1
                candidate = f"{base}_{number}"
            self._tracked[name] = candidate
        return self._tracked[name]


def _admitted(name: str) -> str:
    parts = _REFUSED.sub("_", name)[:_LONGEST_NAME].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def store_uri(uri: str | None, database: Path) -> str:
    """Return the configured tracking URI, or that of the sqlite file in the run directory."""
    return uri or f"sqlite:///{database.resolve()}"


def open_command(uri: str) -> str:
    """Return the shell command that shows a store in the browser."""
    if uri.startswith("sqlite:"):
        store = shlex.quote(uri)
        return f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui --workers 1 --backend-store-uri {store}"
    return f"python3 -m webbrowser {shlex.quote(uri)}"
