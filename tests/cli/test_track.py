"""`megappo track`: what trackers lack of a run that has ended."""

import os
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.cli.main import main
from megappo.observability.tracker import JsonlTracker


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that told TensorBoard nothing."""
    (tmp_path / "config.yaml").write_text("seed: 3\ntracking:\n  trackers: [tensorboard]\n")
    (tmp_path / "summary.json").write_text('{"exit": "completed"}')
    for step in (1, 2):
        JsonlTracker(tmp_path / "metrics.jsonl").log(step, {"reward/mean": step / 2})
    return tmp_path


def test_it_sends_what_is_lacking_and_a_second_time_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["track", str(run)]) == 0
        assert capsys.readouterr().out == f"TensorBoard has everything of {run} up to step 2\n"
    read = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]


def test_a_server_that_is_away_keeps_others_from_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = ["tracking.trackers=[mlflow,tensorboard]", "tracking.mlflow_uri=http://127.0.0.1:9"]
    assert main(["track", str(run), *away]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("MLflow failed, the others go on: MlflowException: API request to http://127.0.0.1:9/")
    assert second == f"TensorBoard has everything of {run} up to step 2"


def test_what_is_no_run_or_still_going_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track", str(run / "logs")]) == 1
    assert "is no folder of a run: it has no config.yaml" in capsys.readouterr().err
    parent = psutil.Process(os.getppid())
    (run / "owner.pid").write_text(f"{parent.pid} {parent.create_time()}")
    assert main(["track", str(run)]) == 1
    assert "belongs to a run that is still going" in capsys.readouterr().err
    assert not (run / "tensorboard").exists()
