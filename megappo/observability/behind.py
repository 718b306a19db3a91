"""Which rank the others wait for, from what each of them has counted of its collectives.

Invariants (asserted by tests/observability/test_behind.py):
1. A rank waits for those members of the group of its newest collective that have begun fewer collectives of that group.
2. A rank that waits for others in turn is not to blame: the blame follows the waiting to those who wait for nobody.
3. In a circle of waiting everybody in it is named, as a circle.
4. Where all members have entered, nobody is behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megappo.observability.board import GroupPosition


@dataclass(kw_only=True, slots=True, frozen=True)
class Behind:
    """A rank that others wait for."""

    rank: int
    waiting: tuple[int, ...]
    """Ranks that wait for it directly."""
    at: GroupPosition
    """Where the one of these is that has waited longest."""
    count: int
    """How many of that group's collectives the rank itself has begun."""
    in_circle: bool
    """Whether it waits, over others, for itself: ranks call collectives in different orders."""


def find_behind(positions: Mapping[int, Sequence[GroupPosition]]) -> list[Behind]:
    """Return the ranks that hold the others up, the one that most ranks wait for first.

    Args:
        positions: of each rank of one world, the newest first. Ranks that nobody could read are left out.
    """
    waits_for = {rank: _waits_for(rank, positions) for rank in positions}
    waited_for = {other for others in waits_for.values() for other in others}
    last = {rank for rank in waited_for if not waits_for[rank]}
    causes = last | _circles(waits_for, last)
    found: list[Behind] = []
    for cause in causes:
        waiting = sorted(rank for rank, others in waits_for.items() if cause in others)
        if not waiting:
            continue
        longest = max((positions[rank][0] for rank in waiting), key=lambda position: position.seconds)
        found.append(
            Behind(
                rank=cause,
                waiting=tuple(waiting),
                at=longest,
                count=waits_for[waiting[0]][cause],
                in_circle=bool(waits_for[cause]),
            )
        )
    return sorted(found, key=lambda behind: (-len(behind.waiting), behind.rank))


def _waits_for(rank: int, positions: Mapping[int, Sequence[GroupPosition]]) -> dict[int, int]:
    """Return the ranks that are behind in a rank's newest collective, and how many of that group they have begun."""
    if not positions[rank]:
        return {}
    newest = positions[rank][0]
    group = _seen_by_peer(newest.group, rank)
    counts = {
        member: next((position.count for position in positions[member] if position.group == group), 0)
        for member in newest.ranks
        if member != rank and member in positions
    }
    return {member: count for member, count in counts.items() if count < newest.count}


def _seen_by_peer(group: str, rank: int) -> str:
    """Return the name under which the other side counts: of a connection to a rank it is the one from this rank."""
    name, _, peer = group.rpartition(" ")
    for mine, theirs in ((" to", " from"), (" from", " to")):
        if peer.isdigit() and name.endswith(mine):
            return f"{name.removesuffix(mine)}{theirs} {rank}"
    return group


def _circles(waits_for: Mapping[int, Mapping[int, int]], last: set[int]) -> set[int]:
    """Return the ranks from which no waiting leads to `last`, without those for whom none of the others waits."""
    freed = set(last)
    while more := {rank for rank, others in waits_for.items() if rank not in freed and not freed.isdisjoint(others)}:
        freed |= more
    left = {rank for rank, others in waits_for.items() if others and rank not in freed}
    while outer := {rank for rank in left if not any(rank in waits_for[other] for other in left)}:
        left -= outer
    return left
