"""The cycle collector beside a run."""

import gc
import weakref

import pytest

from megappo.controller.garbage import rare_collection


class Node:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_exists_is_left_alone_during_a_run_and_cycles_made_in_it_are_found() -> None:
    with rare_collection():
        assert gc.get_freeze_count() > 1000
        made = weakref.ref(Node())
        assert made() is not None
        gc.collect()
        assert made() is None


def test_everything_is_as_before_after_a_run_that_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collection():
        assert gc.get_threshold()[0] > before[0]
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
