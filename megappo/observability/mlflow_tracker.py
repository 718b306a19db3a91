"""MLflow as a tracker: a sqlite store in the run directory unless a server is named.

Metric names: MLflow admits letters, digits and `_ - . : /` and the space. Any other character becomes `_`, an empty
part of a path too (`a//b` -> `a/_/b`); a name that would then equal another one gets `_2`, `_3`, ... at its end.
metrics.jsonl keeps the names as they are.

A run that is resumed goes on with the MLflow run whose id is in its folder. MLflow deletes no number: steps after the
checkpoint are logged a second time, and where the two differ (`timing/`, `perf/`) both stay.

mlflow is imported when a tracker is made: it takes seconds, which pass in the tracker's own thread.
"""

import logging
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megappo.observability.run_directory import write_atomically
from megappo.observability.tracker import Line, Row

_REFUSED = re.compile(r"[^A-Za-z0-9_\-. :/]")
_LONGEST_NAME = 240
_METRICS_PER_CALL = 1000
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker:
    """One MLflow run. Slow to open (a new database takes 6-15 s): wrap it in `BackgroundTracker`."""

    def __init__(self, *, uri: str, experiment: str, run_name: str, artifacts: Path, id_file: Path) -> None:
        """`id_file` keeps the id of the MLflow run; if it is there, that run goes on."""
        # Off unless the user set it: a training run on a private network should not call out.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        # The creation of a database is told at level INFO, in the middle of the progress bar.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        if found is not None:
            experiment_id = found.experiment_id
        else:
            # A sqlite store would put artifacts below the working directory.
            location = artifacts.resolve().as_uri() if uri.startswith("sqlite:") else None
            experiment_id = self._client.create_experiment(experiment, artifact_location=location)
        self._names = MetricNames()
        if id_file.exists():
            self._run_id = id_file.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
            write_atomically(id_file, self._run_id + "\n")

    def continue_run(self, lines: Sequence[Line]) -> None:
        # A process that is killed has numbers that it has not sent yet.
        known = {name: self._steps_of(name) for name in {name for _, values in lines for name in values}}
        for step, values in lines:
            lost = {name: value for name, value in values.items() if step not in known[name]}
            if lost:
                self.log(step, lost)

    def _steps_of(self, name: str) -> set[int]:
        history = self._client.get_metric_history(self._run_id, self._names.tracked(name))
        return {point.step for point in history}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(self._names.tracked(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_PER_CALL])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def table(self, name: str, rows: Sequence[Row]) -> None:
        if not rows:
            return
        file = f"{_admitted(name)}.json"
        known = {found.path for found in self._client.list_artifacts(self._run_id, file.rpartition("/")[0] or None)}
        if file in known:
            # A resumed run writes it again, and log_table would add the rows to those that are there.
            content = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self._client.log_dict(self._run_id, content, file)
        else:
            columns = {column: [row[column] for row in rows] for column in rows[0]}
            self._client.log_table(self._run_id, columns, file)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[status])


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
