"""The invariants of `megappo.controller.epochs`."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.controller.epochs import EpochBatches
from megappo.errors import DataError

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def batches_of(
    lengths: list[int], *, size: int = 1, tokens: int | None = None, seed: int = 0, shuffle: bool = True
) -> EpochBatches:
    return EpochBatches(
        lengths=np.array(lengths, np.int64),
        fingerprint="f",
        batch_size=size,
        batch_tokens=tokens,
        seed=seed,
        shuffle=shuffle,
    )


def epoch_of(batches: EpochBatches, epoch: int) -> list[list[int]]:
    first = batches.steps_of(epoch) if epoch else 0
    return [batches.rows_of(step).tolist() for step in range(first + 1, batches.steps_of(epoch + 1) + 1)]


def fewest(sizes: list[int], limit: int) -> int:
    """Batches of consecutive rows, each as large as the limit admits."""
    count, room = 0, 0
    for size in sizes:
        if size > room or count == 0:
            count, room = count + 1, limit
        room -= size
    return count


def smallest_cap(sizes: list[int], limit: int) -> int:
    count = fewest(sizes, limit)
    return next(cap for cap in range(1, limit + 1) if fewest(sizes, cap) == count)


@given(lengths=SIZES, limit=st.integers(1, 60), seed=st.integers(0, 5))
def test_an_epoch_holds_each_row_once_in_few_level_batches_under_the_limit(
    lengths: list[int], limit: int, seed: int
) -> None:
    batches = batches_of(lengths, tokens=limit, seed=seed)
    for epoch in range(2):
        cut = epoch_of(batches, epoch)
        assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
        assert all(rows == sorted(rows) for rows in cut)
        tokens = [sum(lengths[row] for row in rows) for rows in cut]
        assert all(total <= limit or len(rows) == 1 for total, rows in zip(tokens, cut))
        order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
        in_order = [lengths[row] for row in order]
        assert len(cut) == fewest(in_order, limit)
        largest = smallest_cap(in_order, limit)
        assert all(total <= largest or len(rows) == 1 for total, rows in zip(tokens, cut))


def test_batches_by_rows_leave_no_small_rest() -> None:
    assert [len(rows) for rows in epoch_of(batches_of([3] * 65, size=64), 0)] == [33, 32]
    sizes = [len(rows) for rows in epoch_of(batches_of([3] * 5500, size=64), 0)]
    assert (len(sizes), max(sizes), min(sizes)) == (86, 64, 60)


def test_the_order_depends_on_seed_and_epoch_and_a_step_can_be_asked_for_alone() -> None:
    lengths = list(range(1, 30))
    first, again, other = [batches_of(lengths, tokens=40, seed=seed) for seed in (1, 1, 2)]
    assert epoch_of(first, 0) != epoch_of(first, 1)
    assert epoch_of(first, 0) != epoch_of(other, 0)
    last = again.steps_of(3)
    assert [again.rows_of(step).tolist() for step in range(last, 0, -1)][::-1] == [
        rows for epoch in range(3) for rows in epoch_of(first, epoch)
    ]
    assert epoch_of(batches_of([1] * 4, size=2, shuffle=False), 1) == [[0, 1], [2, 3]]


def test_passes_are_counted_by_rows() -> None:
    batches = batches_of([1] * 5, size=3)
    assert [batches.epochs_after(step) for step in range(5)] == [0, 3 / 5, 1, 8 / 5, 2]


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(DataError, match="3 rows are fewer than one batch of 4"):
        batches_of([1, 1, 1], size=4)
    assert batches_of([1, 1, 1], tokens=100).steps_of(1) == 1


@pytest.mark.parametrize("change", [{"seed": 1}, {"size": 2}, {"tokens": 9}, {"shuffle": False}])
def test_other_batches_are_refused(change: dict[str, Any]) -> None:
    batches = batches_of([1, 2, 3])
    batches.check(batches_of([1, 2, 3]).state())
    with pytest.raises(DataError, match="the checkpoint was made with"):
        batches.check(batches_of([1, 2, 3], **change).state())
