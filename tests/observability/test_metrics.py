"""Metrics merge to the same numbers however a batch was cut."""

import math

import pytest

from megappo.observability.metrics import Stat, maximum, mean, merge, minimum, total, values


def test_merged_means_weigh_parts_by_their_counts() -> None:
    merged = merge([{"a": mean(6.0, 3)}, {"a": mean(2.0, 1)}])
    assert values(merged) == {"a": 2.0}


def test_sums_and_extremes_merge() -> None:
    parts = [
        {"sum": total(1), "max": maximum(1), "min": minimum(1)},
        {"sum": total(2), "max": maximum(3), "min": minimum(-1)},
    ]
    assert values(merge(parts)) == {"sum": 3.0, "max": 3.0, "min": -1.0}


def test_nothing_counted_is_absent_and_changes_no_other_part() -> None:
    assert values({"a": mean(0.0, 0), "b": maximum(-math.inf, 0)}) == {}
    assert values(merge([{"a": mean(0.0, 0)}, {"a": mean(4.0, 2)}])) == {"a": 2.0}
    assert values(merge([{"a": maximum(7.0)}, {"a": maximum(99.0, 0)}])) == {"a": 7.0}


def test_a_name_in_one_part_only_is_kept() -> None:
    assert values(merge([{"a": total(1)}, {"b": total(2)}])) == {"a": 1.0, "b": 2.0}


def test_nan_is_never_hidden_by_an_extreme() -> None:
    for extreme in (maximum, minimum):
        for parts in ([extreme(math.nan), extreme(1.0)], [extreme(1.0), extreme(math.nan)]):
            value = parts[0].merge(parts[1]).value
            assert value is not None and math.isnan(value)


def test_different_kinds_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        merge([{"a": mean(1.0, 1)}, {"a": total(1.0)}])


def test_merging_is_associative() -> None:
    parts: list[Stat] = [mean(1.0, 2), mean(5.0, 0), mean(7.0, 3)]
    left, right = parts[0].merge(parts[1]).merge(parts[2]), parts[0].merge(parts[1].merge(parts[2]))
    assert left == right == mean(8.0, 5)
