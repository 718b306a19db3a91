"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.dist_world import DistWorld


@pytest.fixture(scope="session")
def world() -> Iterator[DistWorld]:
    """The processes that distributed tests share; see tests/dist_world.py."""
    shared = DistWorld()
    yield shared
    shared.stop()
