"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.dist_world import DistWorld

# A busy machine makes any example slow: time is no property under test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def world() -> Iterator[DistWorld]:
    """The processes that distributed tests share; see tests/dist_world.py."""
    shared = DistWorld()
    yield shared
    shared.stop()
