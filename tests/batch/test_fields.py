"""The invariants listed in megappo/batch/fields.py."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.batch.fields import (
    BatchError,
    PackedBatch,
    concat,
    offsets_of,
    per_sequence,
    per_token,
    select,
    token_index,
)


@dataclass(kw_only=True, slots=True)
class Numbers(PackedBatch):
    """One required and one optional field of each kind."""

    offsets: np.ndarray
    tokens: np.ndarray = per_token("int32", "token ids")
    weights: np.ndarray | None = per_token("float32", "weight", optional=True)
    ids: np.ndarray = per_sequence("int64", "id")
    scores: np.ndarray | None = per_sequence("float64", "score", optional=True)


def numbers(lengths: list[int], *, optional: bool = False) -> Numbers:
    """Token t of sequence i is 100 * i + t."""
    tokens = [100 * index + token for index, length in enumerate(lengths) for token in range(length)]
    return Numbers(
        offsets=offsets_of(lengths),
        tokens=np.array(tokens, dtype=np.int32),
        ids=np.arange(len(lengths), dtype=np.int64),
        weights=np.array(tokens, dtype=np.float32) / 3 if optional else None,
        scores=np.arange(len(lengths)) / 7 if optional else None,
    )


LENGTHS = st.lists(st.integers(0, 6), max_size=8)


@given(LENGTHS, st.data(), st.booleans())
def test_concat_of_a_partition_is_a_permutation_of_the_batch(lengths, data, optional):
    batch = numbers(lengths, optional=optional)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    joined = concat([select(batch, order[:cut]), select(batch, order[cut:])])
    joined.validate()
    assert joined.ids.tolist() == list(order)
    for position, sequence in enumerate(order):
        start, end = joined.offsets[position], joined.offsets[position + 1]
        assert joined.tokens[start:end].tolist() == [100 * sequence + token for token in range(lengths[sequence])]
    restored = select(joined, np.argsort(order))
    for name in ("offsets", "tokens", "weights", "ids", "scores"):
        before, after = getattr(batch, name), getattr(restored, name)
        assert (before is None) == (after is None)
        if before is not None:
            assert before.dtype == after.dtype
            assert before.tobytes() == after.tobytes()


def test_select_takes_sequences_in_the_given_order():
    chosen = select(numbers([2, 0, 3]), [2, 0])
    assert chosen.offsets.tolist() == [0, 3, 5]
    assert chosen.tokens.tolist() == [200, 201, 202, 0, 1]
    assert chosen.ids.tolist() == [2, 0]


def test_select_may_take_nothing():
    chosen = select(numbers([2, 3], optional=True), [])
    chosen.validate()
    assert (chosen.num_sequences, chosen.num_tokens) == (0, 0)


def test_select_copies_so_that_a_part_never_changes_the_whole():
    batch = numbers([2, 2])
    select(batch, [0]).tokens[0] = 9
    assert batch.tokens[0] == 0


def test_token_index_lists_the_tokens_of_the_sequences():
    assert token_index(np.array([0, 2, 2, 5]), np.array([2, 1, 0])).tolist() == [2, 3, 4, 0, 1]


def test_lengths_and_counts_follow_from_the_offsets():
    batch = numbers([2, 0, 3])
    assert (batch.num_sequences, batch.num_tokens) == (3, 5)
    assert batch.lengths.tolist() == [2, 0, 3]
    assert offsets_of([]).tolist() == [0]
    assert offsets_of([]).dtype == np.int64


def test_a_field_present_in_some_batches_only_is_named():
    with pytest.raises(BatchError, match=r"\['scores', 'weights'\]"):
        concat([numbers([1]), numbers([1], optional=True)])


def test_concat_of_nothing_is_an_error():
    with pytest.raises(BatchError, match="no batches"):
        concat([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros(4, np.int32)}, r"Numbers\.tokens is int32\[4\], must be int32\[5\] \(token ids\)"),
        ({"tokens": np.zeros(5, np.int64)}, r"Numbers\.tokens is int64\[5\], must be int32\[5\]"),
        ({"tokens": np.zeros((1, 5), np.int32)}, r"Numbers\.tokens is int32\[1, 5\]"),
        ({"weights": np.zeros(2, np.float32)}, r"Numbers\.weights is float32\[2\], must be float32\[5\]"),
        ({"ids": np.zeros(5, np.int64)}, r"Numbers\.ids is int64\[5\], must be int64\[2\]"),
        ({"offsets": np.array([1, 2, 5])}, "must start at 0 and never fall"),
        ({"offsets": np.array([0, 6, 5])}, "must start at 0 and never fall"),
        ({"offsets": np.array([[0, 2, 5]])}, "must start at 0 and never fall"),
        ({"offsets": np.array([], np.int64)}, "must start at 0 and never fall"),
        ({"offsets": np.array([0.0, 2.0, 5.0])}, r"offsets is float64, must be int64"),
    ],
)
def test_validation_names_the_first_field_that_is_wrong(changes, message):
    batch = numbers([2, 3])
    for name, value in changes.items():
        setattr(batch, name, value)
    with pytest.raises(BatchError, match=message):
        batch.validate()
