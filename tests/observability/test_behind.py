"""Who holds the others up, in worlds small enough to see it."""

import pytest

from megappo.observability.behind import find_behind
from megappo.observability.board import GroupPosition

WORLD = (0, 1, 2, 3)


def at(group: str, count: int, seconds: float, *ranks: int, inside: bool = True) -> GroupPosition:
    return GroupPosition(
        group=group, count=count, operation="all_reduce", inside=inside, seconds=seconds, ranks=ranks or WORLD
    )


CASES = {
    "one rank has not entered what the three others wait in": (
        {
            0: [at("world", 5, 30.0)],
            1: [at("world", 5, 29.0)],
            2: [at("world", 4, 31.0, inside=False)],
            3: [at("world", 5, 28.0)],
        },
        [(2, (0, 1, 3), "world", 4, False)],
    ),
    "a rank that never took part in the group has begun none": (
        {0: [at("a", 1, 9.0, 0, 1)], 1: []},
        [(1, (0,), "a", 0, False)],
    ),
    "the blame follows the waiting: 0 waits for 1 in tensor, 1 for 3 in data": (
        {
            0: [at("tensor 0", 8, 20.0, 0, 1)],
            1: [at("data 1", 3, 25.0, 1, 3), at("tensor 0", 7, 26.0, 0, 1, inside=False)],
            2: [at("tensor 1", 8, 21.0, 2, 3)],
            3: [at("tensor 1", 7, 40.0, 2, 3, inside=False), at("data 1", 2, 41.0, 1, 3, inside=False)],
        },
        [(3, (1, 2), "data 1", 2, False)],
    ),
    "a receiver waits for its sender": (
        {0: [at("pp 4 from 1", 2, 12.0, 1)], 1: [at("pp 4 to 0", 1, 50.0, 0, inside=False)]},
        [(1, (0,), "pp 4 from 1", 1, False)],
    ),
    "a sender waits for a receiver that has not asked": (
        {0: [at("pp 4 to 1", 2, 12.0, 1)], 1: [at("pp 4 from 0", 1, 50.0, 0, inside=False)]},
        [(1, (0,), "pp 4 to 1", 1, False)],
    ),
    "a circle: two ranks call two groups in different orders": (
        {
            0: [at("a", 1, 9.0, 0, 1)],
            1: [at("b", 1, 8.0, 0, 1)],
        },
        [(0, (1,), "b", 0, True), (1, (0,), "a", 0, True)],
    ),
    "who waits for a circle is not part of it": (
        {
            0: [at("a", 1, 9.0, 0, 1)],
            1: [at("b", 1, 8.0, 0, 1)],
            2: [at("c", 1, 7.0, 0, 2)],
        },
        [(0, (1, 2), "b", 0, True), (1, (0,), "a", 0, True)],
    ),
    "all have entered, nobody is behind": ({0: [at("a", 4, 9.0, 0, 1)], 1: [at("a", 4, 8.0, 0, 1)]}, []),
    "a rank that nobody could read is not judged": ({0: [at("a", 4, 9.0, 0, 1)]}, []),
    "an asynchronous collective counts when it is begun": (
        {0: [at("a", 4, 9.0, 0, 1, inside=False)], 1: [at("a", 3, 8.0, 0, 1, inside=False)]},
        [(1, (0,), "a", 3, False)],
    ),
    "no ranks": ({}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_others_wait_for_is_named(name: str) -> None:
    positions, expected = CASES[name]
    found = find_behind(positions)
    assert [(one.rank, one.waiting, one.at.group, one.count, one.in_circle) for one in found] == expected


def test_the_rank_that_most_wait_for_comes_first() -> None:
    positions = {
        0: [at("a", 2, 9.0, 0, 1)],
        1: [],
        2: [at("b", 2, 9.0, 2, 3, 4)],
        3: [],
        4: [at("b", 2, 5.0, 2, 3, 4)],
    }
    assert [(one.rank, one.waiting) for one in find_behind(positions)] == [(3, (2, 4)), (1, (0,))]
