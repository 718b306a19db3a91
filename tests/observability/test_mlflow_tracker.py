"""What MLflow holds of a run, in its sqlite store."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from megappo.config.record import TrackingConfig
from megappo.observability.mlflow_tracker import MetricNames, MlflowTracker, open_command, store_uri
from megappo.observability.run_directory import RunDirectory
from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import WALL_TIME, JsonlTracker, keep_lines
from megappo.observability.tracker_spec import TrackerSpec


def open_tracker(directory: RunDirectory) -> MlflowTracker:
    return MlflowTracker(TrackerSpec(config=TrackingConfig(), run_name="mine", directory=directory))


def client_of(directory: RunDirectory) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{directory.database}")


def run_of(directory: RunDirectory) -> Any:
    return client_of(directory).get_run(directory.mlflow_run.read_text().strip())


def points_of(directory: RunDirectory, name: str) -> list[tuple[int, float, int]]:
    """Step, value and time of every point."""
    history = client_of(directory).get_metric_history(directory.mlflow_run.read_text().strip(), name)
    return sorted((point.step, point.value, point.timestamp) for point in history)


def table_of(directory: RunDirectory, name: str) -> Any:
    return json.loads((directory.path / "mlflow" / run_of(directory).info.run_id / "artifacts" / name).read_text())


def test_it_holds_numbers_configuration_tables_files_name_and_status(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = open_tracker(directory)
    tracker.catch_up(RunFiles(directory))
    for step in (1, 2):
        tracker.log(step, {"reward/mean": step / 4, "val/mean@4": 1.0, "nan": float("nan"), WALL_TIME: 10.5 + step})
    tracker.table("generations/step_000002", [{"response": "a", "score": 1.0}, {"response": "b", "score": None}])
    tracker.close("finished")
    found = run_of(directory)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    experiment = client_of(directory).get_experiment(found.info.experiment_id)
    assert experiment.name == "megappo"
    assert points_of(directory, "reward/mean") == [(1, 0.25, 11500), (2, 0.5, 12500)]
    assert found.data.metrics["val/mean_4"] == 1.0 and WALL_TIME not in found.data.metrics
    assert found.data.params == {"seed": "1", "model.path": "a model", "model.dtype": "float32"}
    files = [file.path for file in client_of(directory).list_artifacts(found.info.run_id)]
    assert files == ["config.yaml", "generations"]
    expected = {"columns": ["response", "score"], "data": [["a", 1.0], ["b", None]]}
    assert table_of(directory, "generations/step_000002.json") == expected
    (logged,) = json.loads(found.data.tags["mlflow.loggedArtifacts"])  # what makes it a table for MLflow's pages
    assert logged == {"path": "generations/step_000002.json", "type": "table"}
    # Nothing lands in the working directory.
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_resumed_run_goes_on_in_the_same_run_with_what_was_lost_and_what_came_out_otherwise(
    directory: RunDirectory,
) -> None:
    files, lines = RunFiles(directory), JsonlTracker(directory.metrics)
    for step in (1, 2, 3):
        lines.log(step, {"reward/mean": step / 4, "timing/step_s": 1.0, WALL_TIME: 10.0 + step})
    directory.generations.mkdir()
    answers = [{"response": "old", "score": 0.0, "parts": {}}]
    for step in (2, 3):
        (directory.generations / f"step_{step:06d}.jsonl").write_text(json.dumps(answers[0]) + "\n")
    tracker = open_tracker(directory)
    tracker.catch_up(files)
    tracker.close("failed")
    first = run_of(directory).info.run_id
    # Step 3 comes again, and so do its answers; of step 2 the process that was killed had kept a metric for itself.
    keep_lines(directory.metrics, last_step=2)
    directory.drop_steps_after(2)
    directory.config.write_text(directory.config.read_text().replace("seed: 1", "seed: 1\nnew: 2"))
    line = json.loads(directory.metrics.read_text().splitlines()[1]) | {"lost": 7.0}
    directory.metrics.write_text(directory.metrics.read_text().splitlines()[0] + "\n" + json.dumps(line) + "\n")
    tracker = open_tracker(directory)
    assert run_of(directory).info.status == "RUNNING"
    assert tracker.catch_up(files) == 2
    tracker.log(3, {"reward/mean": 0.75, "timing/step_s": 2.0, WALL_TIME: 103.0})
    tracker.table("generations/step_000003", [{"response": "new", "score": 0.5}])
    tracker.close("finished")
    assert run_of(directory).info.run_id == first
    assert points_of(directory, "reward/mean") == [(1, 0.25, 11000), (2, 0.5, 12000), (3, 0.75, 13000)]
    assert points_of(directory, "timing/step_s")[2:] == [(3, 1.0, 13000), (3, 2.0, 103000)]
    assert points_of(directory, "lost") == [(2, 7.0, 12000)]
    assert table_of(directory, "generations/step_000002.json")["data"][0][4] == "old"
    assert table_of(directory, "generations/step_000003.json") == {
        "columns": ["response", "score"],
        "data": [["new", 0.5]],
    }
    assert run_of(directory).data.params["new"] == "2"


def test_a_point_whose_answer_was_lost_is_the_same_when_it_is_sent_again(directory: RunDirectory) -> None:
    tracker = open_tracker(directory)
    tracker.catch_up(RunFiles(directory))
    for _ in range(2):
        tracker.log(1, {"a": 0.1, WALL_TIME: 5.25})
    assert points_of(directory, "a") == [(1, 0.1, 5250)]


def test_a_run_that_the_store_does_not_know_is_made_anew_with_all_of_it(directory: RunDirectory) -> None:
    JsonlTracker(directory.metrics).log(1, {"a": 0.5})
    directory.mlflow_run.write_text("0123456789abcdef0123456789abcdef\n")
    tracker = open_tracker(directory)
    tracker.catch_up(RunFiles(directory))
    assert [(step, value) for step, value, _ in points_of(directory, "a")] == [(1, 0.5)]


def test_metric_names_follow_the_rule_and_never_collide() -> None:
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
