"""Rules of the section `tracking`."""

import importlib.util
from dataclasses import replace

import pytest

from megappo.config.record import TrackingConfig
from megappo.config.run import RunConfig
from megappo.config.tracking_rules import trackers_can_be_made


def with_trackers(*names: str) -> RunConfig:
    return replace(RunConfig(), tracking=TrackingConfig(trackers=list(names)))


def test_each_tracker_is_named_once() -> None:
    (violation,) = trackers_can_be_made(with_trackers("mlflow", "tensorboard", "mlflow"))
    assert str(violation) == "tracking.trackers=mlflow is named twice (name it once)"
    assert trackers_can_be_made(with_trackers("mlflow", "tensorboard", "mine:Tracker")) == []


def test_a_package_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (violation,) = trackers_can_be_made(with_trackers("tensorboard"))
    assert "pip install tensorboard" in str(violation)
    assert trackers_can_be_made(with_trackers("mlflow")) == []
