"""The invariants of `megappo.checkpoint.retention`."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.checkpoint.retention import best_step, reasons_to_keep, steps_to_delete
from megappo.config.checkpoint import BestMode, CheckpointConfig


@pytest.mark.parametrize(
    ("whole", "damaged", "keep", "best", "pointed", "deleted"),
    [
        ([], [], CheckpointConfig(), None, None, []),
        ([10], [], CheckpointConfig(keep_last=1), None, 10, []),
        ([10, 20], [], CheckpointConfig(keep_last=1), None, 20, [10]),
        ([10, 20, 30], [], CheckpointConfig(keep_last=2), None, 30, [10]),
        ([10, 20, 30, 40], [], CheckpointConfig(keep_last=1, keep_every=20), None, 40, [10, 30]),
        ([10, 20, 30, 40], [], CheckpointConfig(keep_last=1), 20, 40, [10, 30]),
        ([10, 20, 30], [], CheckpointConfig(keep_last=1), None, 10, [20]),
        # Damaged ones neither count nor leave before enough whole ones are newer.
        ([10], [20, 30], CheckpointConfig(keep_last=1), None, 30, []),
        ([10, 40], [20, 30], CheckpointConfig(keep_last=1), None, 40, [10, 20, 30]),
        ([10, 40], [20, 30], CheckpointConfig(keep_last=2), None, 40, []),
        ([], [20, 30], CheckpointConfig(keep_last=1), None, 30, []),
    ],
)
def test_what_leaves(
    whole: list[int],
    damaged: list[int],
    keep: CheckpointConfig,
    best: int | None,
    pointed: int | None,
    deleted: list[int],
) -> None:
    assert steps_to_delete(whole, damaged, keep, best=best, pointed=pointed) == deleted


@settings(max_examples=60)
@given(
    whole=st.sets(st.integers(0, 20)),
    damaged=st.sets(st.integers(0, 20)),
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 9),
    best=st.none() | st.integers(0, 20),
    pointed=st.none() | st.integers(0, 20),
)
def test_newest_best_pointed_and_every_kth_stay_and_so_does_a_whole_one(
    whole: set[int], damaged: set[int], last: int, every: int | None, best: int | None, pointed: int | None
) -> None:
    damaged -= whole
    keep = CheckpointConfig(keep_last=last, keep_every=every)
    deleted = set(steps_to_delete(whole, damaged, keep, best=best, pointed=pointed))
    left = whole - deleted
    newest = sorted(whole, reverse=True)[:last]
    assert set(newest) <= left
    assert pointed not in deleted
    assert best not in deleted & whole
    assert all(step in left for step in whole if every is not None and step % every == 0)
    assert left or not whole
    assert all(sum(other > step for other in whole) >= last for step in deleted)


def test_reasons_are_told() -> None:
    keep = CheckpointConfig(keep_last=1, keep_every=20, keep_best="val/reward/mean")
    assert reasons_to_keep([10, 20, 30], keep, best=10, pointed=30) == {
        10: ["best val/reward/mean"],
        20: ["every 20"],
        30: ["last", "latest"],
    }


@pytest.mark.parametrize(
    ("values", "whole", "mode", "best"),
    [
        ({10: 0.5, 20: 0.9, 30: 0.7}, [10, 20, 30], BestMode.max, 20),
        ({10: 0.5, 20: 0.9, 30: 0.7}, [10, 20, 30], BestMode.min, 10),
        ({10: 0.5, 20: 0.9}, [10, 30], BestMode.max, 10),
        ({10: 0.5, 20: 0.5}, [10, 20], BestMode.max, 20),
        ({10: 0.5, 20: 0.5}, [10, 20], BestMode.min, 20),
        ({10: math.nan, 20: -1.0}, [10, 20], BestMode.max, 20),
        ({10: math.nan}, [10], BestMode.max, None),
        ({}, [10], BestMode.max, None),
    ],
)
def test_the_best_has_the_best_value_and_is_the_newer_of_equals(
    values: dict[int, float], whole: list[int], mode: BestMode, best: int | None
) -> None:
    assert best_step(values, whole, mode) == best
