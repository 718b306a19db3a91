"""Folders of runs, and an empty MLflow store: making one takes seconds."""

import shutil
from pathlib import Path

import pytest

from megappo.observability.run_directory import RunDirectory


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a sqlite store without a run."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def directory(tmp_path: Path, empty_store: Path) -> RunDirectory:
    """The folder of a run that has just begun."""
    path = tmp_path / "run"
    path.mkdir()
    shutil.copy(empty_store, path / "mlflow.db")
    (path / "config.yaml").write_text("seed: 1\nmodel:\n  path: a model\n  dtype: float32\n")
    return RunDirectory(path=path)
