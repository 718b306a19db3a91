"""Trackers: the local file is complete, MLflow has the same numbers, and no tracker holds up a run."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megappo.errors import MegappoError
from megappo.observability.mlflow_tracker import MetricNames, MlflowTracker, open_command, store_uri
from megappo.observability.tracker import BackgroundTracker, JsonlTracker, Line, Row, keep_lines, last_line


def test_jsonl_has_one_line_a_step_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"reward/mean": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5}
    tracker.log(2, {"reward/mean": 0.75})
    tracker.close("finished")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_jsonl_names_numbers_that_json_has_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"a": float("nan"), "b": float("-inf")})
    tracker.close("failed")
    assert json.loads(path.read_text()) == {"step": 1, "a": "nan", "b": "-inf"}


def test_jsonl_of_a_resumed_run_is_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(tmp_path / "metrics.jsonl")
        tracker.log(step, {})
        tracker.close("finished")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_resumes_keeps_the_lines_up_to_its_checkpoint_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert keep_lines(path, last_step=2) == [] and last_line(path) == -1
    tracker = JsonlTracker(path)
    tracker.log(0, {"val/reward/mean": 0.1})
    tracker.log(1, {"a": 0.1 + 0.2, "b": float("-inf")})
    tracker.log(2, {"a": 1e-300})
    before = path.read_bytes()
    tracker.log(3, {"a": 3.0})
    with path.open("a") as file:
        file.write('{"step": 4, "a": 4.')  # the process was killed
    assert last_line(path) == 3
    assert keep_lines(path, last_step=2) == [
        (0, {"val/reward/mean": 0.1}),
        (1, {"a": 0.1 + 0.2, "b": float("-inf")}),
        (2, {"a": 1e-300}),
    ]
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [b'{"step": 1', b"null", b"[1]", b'{"loss": 1}', b'{"step": 1, "a": {}}', b"\x00\xff"])
def test_a_damaged_line_in_the_middle_is_not_silently_dropped(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"step": 2}\n')
    with pytest.raises(MegappoError, match=r"metrics.jsonl line 1 holds no metrics: .* \(remove it, or the file"):
        keep_lines(path, last_step=2)


def test_a_disk_that_takes_no_metrics_is_a_clear_error(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(MegappoError, match=r"gone/metrics.jsonl cannot be written: No such file .*resume=auto goes on"):
        tracker.log(1, {"a": 1.0})


def test_mlflow_holds_numbers_config_name_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")
    warnings: list[str] = []
    uri = store_uri(None, run / "mlflow.db")
    tracker = BackgroundTracker(
        lambda: MlflowTracker(
            uri=uri, experiment="megappo", run_name="mine", artifacts=run / "mlflow", id_file=run / "id"
        ),
        name="MLflow",
        warn=warnings.append,
        close_timeout_s=120.0,
    )
    tracker.artifact(run / "config.yaml")
    for step in (1, 2):
        tracker.log(step, {"reward/mean": step / 4, "val/mean@4": 1.0, "nan": float("nan")})
    tracker.table("generations/step_000002", [{"response": "a", "score": 1.0}, {"response": "b", "score": None}])
    tracker.close("finished")

    assert warnings == []
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("megappo")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.25), (2, 0.5)]
    assert found.data.metrics["val/mean_4"] == 1.0
    artifacts = [artifact.path for artifact in client.list_artifacts(found.info.run_id)]
    assert artifacts == ["config.yaml", "generations"]
    table = run / "mlflow" / found.info.run_id / "artifacts/generations/step_000002.json"
    expected = {"columns": ["response", "score"], "data": [["a", 1.0], ["b", None]]}
    assert json.loads(table.read_text()) == expected
    (logged,) = json.loads(found.data.tags["mlflow.loggedArtifacts"])  # what makes it a table for MLflow's pages
    assert logged == {"path": "generations/step_000002.json", "type": "table"}
    # Nothing lands in the working directory.
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    # The process was killed before it had sent the third step; another one goes on from the second checkpoint.
    resumed = MlflowTracker(
        uri=uri, experiment="megappo", run_name="mine", artifacts=run / "mlflow", id_file=run / "id"
    )
    assert client.get_run(found.info.run_id).info.status == "RUNNING"
    resumed.continue_run([(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5}), (3, {"reward/mean": 0.75})])
    resumed.log(4, {"reward/mean": 1.0})
    resumed.table("generations/step_000002", [{"response": "c", "score": 0.5}])
    resumed.close("finished")
    assert json.loads(table.read_text()) == {"columns": ["response", "score"], "data": [["c", 0.5]]}
    (same,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(same.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_mlflow_metric_names_follow_the_rule_and_never_collide() -> None:
    names = MetricNames()
    assert names.tracked("timing/step_s") == "timing/step_s"
    assert names.tracked("val/mean@4") == "val/mean_4"
    assert names.tracked("val/mean_4") == "val/mean_4_2"
    assert names.tracked("val/mean@4") == "val/mean_4"
    assert names.tracked("a//b") == "a/_/b"
    assert names.tracked("../x") == "_/x"
    assert names.tracked("timing(s)/gen,1=2%") == "timing_s_/gen_1_2_"


def test_the_open_command_can_be_pasted(tmp_path: Path) -> None:
    command = open_command(store_uri(None, tmp_path / "my run" / "mlflow.db"))
    assert command == (
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui --workers 1 "
        f"--backend-store-uri 'sqlite:///{tmp_path}/my run/mlflow.db'"
    )
    assert store_uri("http://tracking:5000", tmp_path / "mlflow.db") == "http://tracking:5000"


class Failing:
    """A tracker whose server goes away at step 3."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def continue_run(self, lines: Sequence[Line]) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            raise ConnectionError("connection refused")
        self.steps.append(step)

    def artifact(self, path: Path) -> None: ...

    def table(self, name: str, rows: Sequence[Row]) -> None: ...

    def close(self, status: str) -> None: ...


def test_a_failing_tracker_is_said_once_and_ends_alone() -> None:
    warnings: list[str] = []
    failing = Failing()
    tracker = BackgroundTracker(lambda: failing, name="MLflow", warn=warnings.append)
    for step in range(1, 6):
        tracker.log(step, {})
    tracker.close("finished")
    assert failing.steps == [1, 2]
    assert warnings == ["MLflow failed, the run goes on without it: ConnectionError: connection refused"]


def test_a_tracker_that_cannot_be_made_is_said_once() -> None:
    def make() -> Failing:
        raise OSError("no such server")

    warnings: list[str] = []
    tracker = BackgroundTracker(make, name="MLflow", warn=warnings.append)
    tracker.log(1, {})
    tracker.close("finished")
    assert warnings == ["MLflow failed, the run goes on without it: OSError: no such server"]


def test_a_tracker_that_hangs_holds_up_neither_steps_nor_the_end() -> None:
    release = threading.Event()

    class Hanging(Failing):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait()

    warnings: list[str] = []
    tracker = BackgroundTracker(Hanging, name="MLflow", warn=warnings.append, close_timeout_s=0.05)
    for step in range(100):
        tracker.log(step, {})
    tracker.close("finished")
    assert warnings == ["MLflow did not take the last numbers within 0 s"]
    release.set()


def test_values_logged_are_those_at_the_time_of_the_call() -> None:
    seen: list[dict[str, float]] = []

    class Keeping(Failing):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            seen.append(dict(values))

    tracker = BackgroundTracker(Keeping, name="MLflow", warn=lambda text: None)
    values = {"a": 1.0}
    tracker.log(1, values)
    values["a"] = 2.0
    tracker.close("finished")
    assert seen == [{"a": 1.0}]
