"""Compaction, sums per sequence, moments and whitening."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.algo.masked import Moments, compact, merge_moments, whiten
from tests.algo.packed import flatten, tokens_of

MASKS = [[0, 1, 1], [], [0, 0], [1], [1, 0, 1, 0]]


def test_compaction_keeps_the_tokens_on_the_mask_in_order() -> None:
    tokens = tokens_of(MASKS)
    assert tokens.index.tolist() == [1, 2, 5, 6, 8]
    assert tokens.offsets.tolist() == [0, 2, 2, 2, 3, 5]
    assert tokens.sequence.tolist() == [0, 0, 3, 4, 4]
    assert tokens.lengths.tolist() == [2, 0, 0, 1, 2]


def test_gather_never_reads_off_the_mask_and_scatter_leaves_zeros_there() -> None:
    tokens = tokens_of(MASKS)
    values = np.array([np.nan, 1.0, 2.0, np.inf, 1e6, 3.0, 4.0, np.nan, 5.0, -np.inf])
    assert tokens.gather(values).tolist() == [1, 2, 3, 4, 5]
    assert tokens.scatter(tokens.gather(values)).tolist() == [0, 1, 2, 0, 0, 3, 4, 0, 5, 0]


def test_sums_and_means_are_per_sequence_and_absent_for_empty_ones() -> None:
    tokens = tokens_of(MASKS)
    values = np.array([1.0, 2.0, 3.0, 4.0, 6.0])
    assert tokens.sums(values).tolist() == [3, 0, 0, 3, 10]
    np.testing.assert_array_equal(tokens.means(values), [1.5, np.nan, np.nan, 3, 5])


def test_a_batch_without_sequences_is_legal() -> None:
    tokens = compact(np.zeros(0, bool), np.zeros(1, np.int64))
    assert tokens.sums(np.zeros(0)).tolist() == []


@given(st.lists(st.lists(st.floats(-100, 100), max_size=6), max_size=5))
def test_moments_of_parts_merge_to_those_of_the_whole(parts: list[list[float]]) -> None:
    whole = flatten(parts)
    merged = merge_moments(Moments.of(np.array(part, dtype=np.float64)) for part in parts)
    assert merged.count == len(whole)
    if len(whole) >= 2:
        # 1e-12 of the largest square: rounding of a few float64 additions.
        assert merged.mean == pytest.approx(whole.mean(), abs=1e-11)
        assert merged.variance == pytest.approx(whole.var(ddof=1), abs=1e-8)


def test_moments_keep_a_small_spread_on_a_large_offset() -> None:
    parts = [Moments.of(np.array([1e8, 1e8 + 1])), Moments.of(np.array([1e8 + 2, 1e8 + 3]))]
    assert merge_moments(parts).variance == pytest.approx(5 / 3)


def test_two_numbers_are_whitened_with_the_unbiased_deviation() -> None:
    values = np.array([1.0, 3.0])
    np.testing.assert_allclose(whiten(values, Moments.of(values).whitening), [-(0.5**0.5), 0.5**0.5], rtol=1e-7)


@pytest.mark.parametrize("values", [[], [2.0]])
def test_fewer_than_two_numbers_stay_as_they_are(values: list[float]) -> None:
    array = np.array(values)
    assert Moments.of(array).whitening is None
    assert whiten(array, None).tolist() == values


def test_equal_numbers_are_whitened_to_zero_without_a_division_by_zero() -> None:
    values = np.full(4, 0.1)
    assert np.abs(whiten(values, Moments.of(values).whitening)).max() < 1e-9
