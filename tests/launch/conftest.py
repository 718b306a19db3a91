"""Fixtures of real launches."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.real_runs import LAUNCH, TIMEOUT_S, Nodes, environment


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the starting model of the quickstart, made by the script for one machine."""
    folder = tmp_path_factory.mktemp("launch")
    command = [str(LAUNCH / "local.sh"), "--env", "cpu", "sft", "experiment=quickstart", "sft.max_steps=25"]
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture
def nodes(work: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Processes that stand for nodes; none of them outlives the test."""
    made = Nodes(work, request.node.name.partition("[")[0][5:40])
    yield made
    made.kill()
