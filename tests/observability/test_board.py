"""Boards are read by another process, from the file alone."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.observability import board
from megappo.observability.board import Board, Owner, close_board, open_board, read_board
from megappo.observability.phases import phase


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "logs" / "actor-1.status"
    close_board()


def open_here(path: Path) -> Board:
    return open_board(path, Owner(name="actor rank 1", role="actor", rank=1))


def test_phases_are_there_while_they_last_the_outermost_first(path: Path) -> None:
    open_here(path)
    with phase("update"), phase("micro_batch", number=2, of=4):
        reading = read_board(path)
        assert reading is not None
        assert [activity.text for activity in reading.activities] == ["update", "micro_batch, number 2, of 4"]
    after = read_board(path)
    assert after is not None
    assert after.activities == ()


def test_more_phases_than_there_are_places_cost_nothing_but_their_telling(path: Path) -> None:
    open_here(path)
    entered = [phase("request", number=number) for number in range(40)]
    for one in entered:
        one.__enter__()
    reading = read_board(path)
    assert reading is not None
    assert len(reading.activities) == 32
    for one in entered:
        one.__exit__(None, None, None)
    with phase("after"):
        found = read_board(path)
    assert found is not None
    assert [activity.text for activity in found.activities] == ["after"]


def test_a_board_counts_collectives_by_group_and_knows_which_has_not_returned(path: Path) -> None:
    own = open_here(path)
    for _ in range(3):
        own.leave(own.enter("tensor 1", "all_gather", (0, 2, 4, 6)))
    own.enter("data 2", "all_reduce", (1, 5, 6))
    reading = read_board(path)
    assert reading is not None
    rows = [(found.group, found.count, found.operation, found.inside, found.ranks) for found in reading.positions]
    assert rows == [
        ("data 2", 1, "all_reduce", True, (1, 5, 6)),
        ("tensor 1", 3, "all_gather", False, (0, 2, 4, 6)),
    ]


def test_more_groups_than_there_are_places_are_left_out(path: Path) -> None:
    own = open_here(path)
    for number in range(70):
        own.leave(own.enter(f"group {number}", "barrier", (0,)))
    reading = read_board(path)
    assert reading is not None
    assert {found.group for found in reading.positions} == {f"group {number}" for number in range(64)}


def test_a_board_outlives_a_process_that_is_killed_and_says_that_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "reward-0.status"
    program = (
        "import os, pathlib, sys\n"
        "from megappo.observability.board import Owner, open_board\n"
        "from megappo.observability.phases import phase\n"
        "open_board(pathlib.Path(sys.argv[1]), Owner(name='reward worker 0', role='reward', rank=0))\n"
        "with phase('score', group=7):\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        alive = read_board(path)
        assert alive is not None
        assert (alive.owner.pid, alive.owner.is_alive()) == (process.pid, True)
        process.kill()
        process.wait()
        dead = read_board(path)
        assert dead is not None
        assert [activity.text for activity in dead.activities] == ["score, group 7"]
        assert not dead.owner.is_alive()


@pytest.mark.parametrize("content", [b"", b"{}", b"no board", b"\0" * 20000])
def test_what_is_no_board_is_not_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.status"
    path.write_bytes(content)
    assert read_board(path) is None


@pytest.mark.parametrize(
    ("ranks", "kept"),
    [
        ((), ()),
        ((3,), (3,)),
        ((0, 1, 2), (0, 1, 2)),
        ((1, 3, 5), (1, 3, 5)),
        ((4, 2), (4, 2)),
        (tuple(range(0, 8192, 8)), tuple(range(0, 8192, 8))),
        ((*range(1000, 1040), 5), ()),
    ],
)
def test_ranks_of_meshes_fit_whatever_their_number(ranks: tuple[int, ...], kept: tuple[int, ...]) -> None:
    packed = board._pack_ranks(ranks)
    assert len(packed) <= 88
    assert board._open_ranks(packed.decode()) == kept
