"""Runs that nobody killed, for comparison; each is made once."""

from functools import cache

import pytest

from tests.controller.resumed_runs import CONFIGS, Started, Whole, start


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a finished run of a configuration."""

    @cache
    def run(name: str) -> Started:
        finished = start(CONFIGS[name](), tmp_path_factory.mktemp("whole") / "run")
        assert finished.finish()
        return finished

    return run
