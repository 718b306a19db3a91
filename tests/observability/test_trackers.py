"""What every tracker does: the contract over the registry, and over one from outside."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megappo.config import name_rules
from megappo.config.record import TrackingConfig
from megappo.observability.background_tracker import close_all
from megappo.observability.run_directory import RunDirectory
from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import WALL_TIME, JsonlTracker, keep_lines
from megappo.observability.tracker_spec import TrackerSpec
from megappo.observability.trackers import TRACKERS, make_run_trackers, places_of
from megappo.registry import RegistryError

OWN = "tests.observability.own_tracker:OwnTracker"
Points = dict[tuple[str, int], list[float]]


def mlflow_points(directory: RunDirectory) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory.database}")
    run_id = directory.mlflow_run.read_text().strip()
    points: Points = {}
    for name in client.get_run(run_id).data.metrics:
        for point in client.get_metric_history(run_id, name):
            points.setdefault((name, point.step), []).append(point.value)
    return points


def tensorboard_points(directory: RunDirectory) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    points: Points = {}
    for name in read.Tags()["scalars"]:
        for point in read.Scalars(name):
            points.setdefault((name, point.step), []).append(point.value)
    return points


def own_points(directory: RunDirectory) -> Points:
    kept = json.loads((directory.path / "own.json").read_text())["points"]
    return {(name, int(step)): [value] for step, values in kept.items() for name, value in values.items()}


READ: dict[str, Callable[[RunDirectory], Points]] = {
    "mlflow": mlflow_points,
    "tensorboard": tensorboard_points,
    OWN: own_points,
}


def spec_of(directory: RunDirectory, trackers: Sequence[str] = ()) -> TrackerSpec:
    return TrackerSpec(config=TrackingConfig(trackers=list(trackers)), run_name="mine", directory=directory)


def write_lines(directory: RunDirectory, *steps: int, scale: float = 0.25) -> None:
    """Metrics of some steps: powers of two, which float32 holds."""
    file = JsonlTracker(directory.metrics)
    for step in steps:
        file.log(step, {"reward/mean": step * scale, WALL_TIME: 1e9 + step})


def test_the_names_in_the_configuration_are_those_of_the_registry() -> None:
    assert list(name_rules.TRACKERS) == TRACKERS.names()
    assert set(READ) == {*TRACKERS.names(), OWN}, "the contract is tested for each"


@pytest.mark.parametrize("name", sorted(READ))
def test_a_tracker_holds_every_point_once_however_often_it_catches_up(name: str, directory: RunDirectory) -> None:
    files, factory = RunFiles(directory), TRACKERS.get(name)
    tracker = factory(spec_of(directory))
    assert tracker.catch_up(files) == -1
    write_lines(directory, 0, 1)
    for step, values in files.lines():
        tracker.log(step, values)
    tracker.close("failed")
    write_lines(directory, 2, 3)  # while it was away
    for _ in range(2):
        tracker = factory(spec_of(directory))
        assert tracker.catch_up(files) == 3
        tracker.close("finished")
    points = {key: values for key, values in READ[name](directory).items() if key[0] != WALL_TIME}
    assert points == {("reward/mean", step): [step / 4] for step in range(4)}


@pytest.mark.parametrize("name", sorted(READ))
def test_a_run_that_is_resumed_does_its_steps_again_and_they_are_there_once(name: str, directory: RunDirectory) -> None:
    files, factory = RunFiles(directory), TRACKERS.get(name)
    write_lines(directory, 1, 2, 3, 4)
    tracker = factory(spec_of(directory))
    tracker.catch_up(files)
    tracker.close("interrupted")
    keep_lines(directory.metrics, last_step=2)
    tracker = factory(spec_of(directory))
    assert tracker.catch_up(files) == 2
    for step in (3, 4, 5):
        tracker.log(step, {"reward/mean": step / 4, "new": 1.0, WALL_TIME: 2e9 + step})
    tracker.close("finished")
    points = READ[name](directory)
    assert {step: values for (metric, step), values in points.items() if metric == "reward/mean"} == {
        step: [step / 4] for step in range(1, 6)
    }
    assert [points["new", step] for step in (3, 4, 5)] == [[1.0]] * 3


@pytest.mark.parametrize("name", sorted(READ))
def test_numbers_that_are_none_and_tables_and_files_are_taken(name: str, directory: RunDirectory) -> None:
    tracker = TRACKERS.get(name)(spec_of(directory))
    tracker.catch_up(RunFiles(directory))
    tracker.log(1, {"a": math.nan, "b": math.inf, "c@2": -math.inf})
    for score in (0.25, 0.5):
        rows = [{"response": "a|b\nc", "score": score}, {"response": "", "score": None}]
        tracker.table("generations/step_000001", rows)
    tracker.artifact(directory.config)
    tracker.close("failed")
    assert math.isnan(READ[name](directory)["a", 1][0])


def test_a_tracker_that_is_not_there_is_refused_and_one_from_outside_needs_no_registration(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    with pytest.raises(RegistryError, match=r"tracker 'wandb' is unknown \(use one of mlflow, tensorboard"):
        make_run_trackers(spec_of(directory, ["wandb"]), print)
    trackers = make_run_trackers(spec_of(directory, [OWN]), print)
    for tracker in trackers:
        tracker.begin()
        tracker.log(1, {"a": 1.0})
    close_all(trackers, "finished")
    assert own_points(directory) == {("a", 1): [1.0]}
    assert json.loads((tmp_path / "own.json").read_text())["status"] == "finished"


def test_people_are_told_how_to_look(tmp_path: Path) -> None:
    config = TrackingConfig(trackers=["mlflow", "tensorboard", OWN])
    places = places_of(config, RunDirectory(path=tmp_path / "my run"))
    assert list(places) == ["in MLflow", "in TensorBoard"]
    assert places["in TensorBoard"] == f"tensorboard --logdir '{tmp_path}/my run'"
    assert places_of(TrackingConfig(trackers=[]), RunDirectory(path=tmp_path)) == {}
