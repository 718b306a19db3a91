"""Group statistics: the invariants listed in megappo/algo/advantages/groups.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.algo.advantages.groups import GroupedValues

VALUES = st.floats(-1e3, 1e3, allow_subnormal=False)


@given(st.lists(st.tuples(VALUES, st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=20), st.randoms())
def test_statistics_are_bitwise_the_same_for_any_order(rows: list[tuple[float, int, int]], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    values, ids, lengths = (np.array(column, dtype=np.float64) for column in zip(*rows))

    def statistics(chosen: list[int]) -> list[np.ndarray]:
        groups = GroupedValues(values[chosen], ids[chosen].astype(np.int64), tie_break=lengths[chosen])
        return [groups.deviations(), groups.deviations(lengths[chosen]), groups.spread(groups.standard_deviations())]

    for straight, shuffled in zip(statistics(list(range(len(rows)))), statistics(order)):
        assert straight[order].tobytes() == shuffled.tobytes()


@given(VALUES, st.integers(1, 9))
def test_equal_values_deviate_by_exactly_zero(value: float, size: int) -> None:
    groups = GroupedValues(np.full(size, value), np.zeros(size, np.int64))
    assert not groups.deviations().any() and not groups.standard_deviations().any()


def test_a_small_spread_on_a_large_offset_keeps_its_precision() -> None:
    groups = GroupedValues(np.array([1e9, 1e9 + 1, 1e9 + 2]), np.zeros(3, np.int64))
    assert groups.deviations().tolist() == [-1, 0, 1]


def test_unequal_groups_have_their_own_mean_and_unbiased_deviation() -> None:
    groups = GroupedValues(np.array([1.0, 4.0, 3.0, 6.0]), np.array([7, 2, 7, 7]))
    assert groups.mean().tolist() == pytest.approx([4, 10 / 3])
    assert groups.standard_deviations().tolist() == pytest.approx([0, (19 / 3) ** 0.5])
    assert groups.sizes.tolist() == [1, 3]
    assert groups.have_signal().tolist() == [False, True]


@pytest.mark.parametrize(
    ("values", "signal"),
    [
        ([0.1 + 0.2, 0.3], False),
        ([1e6, 1e6 + 0.5], False),
        ([1.0, 1.0 + 1e-4], True),
        ([0.0, 1e-9], True),
        ([5.0], False),
        ([np.nan, np.nan], True),
        ([np.inf, np.inf], True),
        ([np.nan], True),
    ],
)
def test_a_group_has_signal_unless_its_spread_is_rounding_error(values: list[float], signal: bool) -> None:
    # A value that is not finite counts as signal, so that it is reported rather than dropped.
    with np.errstate(invalid="ignore"):
        groups = GroupedValues(np.array(values), np.zeros(len(values), np.int64))
        assert groups.have_signal().tolist() == [signal]
