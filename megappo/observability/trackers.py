"""Trackers by name."""

import shlex
from collections.abc import Callable

from megappo.config.record import TrackingConfig
from megappo.observability.background_tracker import BackgroundTracker
from megappo.observability.mlflow_tracker import open_command, store_uri
from megappo.observability.run_directory import RunDirectory
from megappo.observability.run_files import RunFiles
from megappo.observability.tracker import JsonlTracker, RunTracker, Tracker
from megappo.observability.tracker_spec import TrackerSpec
from megappo.registry import Registry

TrackerFactory = Callable[[TrackerSpec], Tracker]
"""What a registry entry is: a class, or a function that makes a tracker."""


def _mlflow(spec: TrackerSpec) -> Tracker:
    from megappo.observability.mlflow_tracker import MlflowTracker

    return MlflowTracker(spec)


def _tensorboard(spec: TrackerSpec) -> Tracker:
    from megappo.observability.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(spec)


TRACKERS: Registry[TrackerFactory] = Registry("tracker")
"""The imports wait for the first use: they cost seconds."""
TRACKERS.register("mlflow", _mlflow)
TRACKERS.register("tensorboard", _tensorboard)

_TITLES = {"mlflow": "MLflow", "tensorboard": "TensorBoard"}


def make_run_trackers(spec: TrackerSpec, say: Callable[[str], None]) -> list[RunTracker]:
    """Return metrics.jsonl and the configured trackers, each in a thread of its own; `say` takes their messages.

    Raises:
        RegistryError: there is no tracker of a name.
    """
    trackers: list[RunTracker] = [JsonlTracker(spec.directory.metrics)]
    files = RunFiles(spec.directory)
    for name in spec.config.trackers:
        factory = TRACKERS.get(name)
        trackers.append(
            BackgroundTracker(
                lambda factory=factory: factory(spec),
                files=files,
                name=title_of(name),
                say=say,
                close_timeout_s=spec.config.close_timeout_s,
            )
        )
    return trackers


def title_of(name: str) -> str:
    """Return what people call a tracker."""
    return _TITLES.get(name, name)


def places_of(config: TrackingConfig, directory: RunDirectory) -> dict[str, str]:
    """Return the commands that show the run in its trackers, by where that is."""
    commands = {
        "mlflow": lambda: open_command(store_uri(config.mlflow_uri, directory.database)),
        "tensorboard": lambda: f"tensorboard --logdir {shlex.quote(str(directory.path))}",
    }
    return {f"in {title_of(name)}": commands[name]() for name in config.trackers if name in commands}
