"""What a process does, where others can read it without its help: in a small file that it has in memory.

A process that hangs in a collective answers no call: its thread is taken, and perhaps Python's lock with it. So each
worker writes what it does as it goes, a microsecond each time, into a file beside its log. The file holds who the
process is, its phases under way (it listens to `megappo.observability.phases`), and of every process group how many
collectives it has begun and the last of them.

A reader may catch half of a change. In a process that hangs nothing changes.
"""

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megappo.observability.phases import Phase, add_listener, remove_listener

SUFFIX = ".status"
_HEADER_BYTES = 1024
_PHASE = struct.Struct("<dH182s")
"""Since when, length of the text, text. A time of 0: the place is free."""
_PHASES = 32
_GROUP = struct.Struct("<dQB7x24s64s88s")
"""When the last one was begun, how many were begun, whether this process is inside it, its name, the name of the group
or connection, and its ranks."""
_GROUPS = 64
_PHASES_AT = _HEADER_BYTES
_GROUPS_AT = _PHASES_AT + _PHASE.size * _PHASES
_BYTES = _GROUPS_AT + _GROUP.size * _GROUPS
_CHANGE = struct.Struct("<dQB")
_INSIDE_AT = 16
_CLOCK_STEP_S = 2.0
"""Least difference between two processes that had the same number; the system's clock may move by less."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Owner:
    """Who writes a board."""

    name: str
    """For messages: `actor rank 1`."""
    role: str
    rank: int
    """Global rank in the default world of its role; engines and rewards: their number."""
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=lambda: this_machine())
    """Which machine or container the number of the process is of."""
    started: float = field(default_factory=lambda: psutil.Process().create_time())

    def is_alive(self) -> bool:
        """Whether the process is there; asked on its machine."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < _CLOCK_STEP_S
        except psutil.Error:
            return False


def this_machine() -> str:
    """Return a name for the processes that this one can look at by their numbers."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


@dataclass(kw_only=True, slots=True, frozen=True)
class Activity:
    """A phase under way."""

    text: str
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupPosition:
    """How far a process is in the collectives of a group, or the messages of a connection."""

    group: str
    """Name of the group, the same on all its ranks; of a connection `<group> to <rank>` or `<group> from <rank>`."""
    count: int
    """How many were begun."""
    operation: str
    """The last of them."""
    inside: bool
    """Whether the call has not returned. (An asynchronous one returns before it is done.)"""
    seconds: float
    """Since it was begun."""
    ranks: tuple[int, ...]
    """Global ranks of the group; empty: unknown."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Reading:
    """What a board says."""

    owner: Owner
    activities: tuple[Activity, ...]
    """The outermost first."""
    positions: tuple[GroupPosition, ...]
    """The newest first."""


class Board:
    """The writing side (port `PhaseListener`)."""

    def __init__(self, path: Path, owner: Owner) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps(_fields(owner)).encode()
        assert len(header) < _HEADER_BYTES, "a process with so long a name"
        # Aside first: a reader never sees one without its header.
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_bytes(header.ljust(_BYTES, b"\0"))
        with aside.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        aside.replace(path)
        self._free = list(range(_PHASES))
        self._places: dict[int, int] = {}
        """By the identity of the phase."""
        self._groups: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def began(self, phase: Phase) -> None:
        """Note a phase; where very many are under way, some are left out."""
        if not self._free:
            return
        place = self._free.pop()
        self._places[id(phase)] = place
        text = describe_phase(phase).encode()[:182]
        _PHASE.pack_into(self._memory, _PHASES_AT + place * _PHASE.size, phase.start_ns * 1e-9, len(text), text)

    def ended(self, phase: Phase, end_ns: int) -> None:
        """Forget a phase."""
        if (place := self._places.pop(id(phase), None)) is not None:
            struct.pack_into("<d", self._memory, _PHASES_AT + place * _PHASE.size, 0.0)
            self._free.append(place)

    def enter(self, group: str, operation: str, ranks: tuple[int, ...]) -> int | None:
        """Note that a collective of a group begins. Returns where, for `leave`; None: there are too many groups."""
        count = self._counts[group] = self._counts.get(group, 0) + 1
        place = self._groups.setdefault(group, len(self._groups))
        if place >= _GROUPS:
            return None
        at = _GROUPS_AT + place * _GROUP.size
        if count == 1:
            _GROUP.pack_into(self._memory, at, 0.0, 0, 0, b"", group.encode()[:64], _pack_ranks(ranks))
        struct.pack_into("24s", self._memory, at + 24, operation.encode())
        _CHANGE.pack_into(self._memory, at, time.monotonic(), count, 1)
        return at

    def leave(self, place: int | None) -> None:
        """Note that the call returned."""
        if place is not None:
            self._memory[place + _INSIDE_AT] = 0

    def close(self) -> None:
        """Give the memory back; the file stays."""
        self._memory.close()


_board: Board | None = None


def open_board(path: Path, owner: Owner) -> Board:
    """Write from now on what this process does; once per process."""
    global _board
    close_board()
    _board = Board(path, owner)
    add_listener(_board)
    return _board


def close_board() -> None:
    """Write nothing any more."""
    global _board
    if _board is not None:
        remove_listener(_board)
        _board.close()
        _board = None


def own_board() -> Board | None:
    """Return the board of this process, if it has one."""
    return _board


def read_board(path: Path) -> Reading | None:
    """Return what a board says; None where it is none, or nobody can read it. The times are those of this machine."""
    try:
        content = path.read_bytes()
        owner = Owner(**json.loads(content[:_HEADER_BYTES].rstrip(b"\0")))
    except (OSError, ValueError, TypeError):
        return None
    if len(content) < _BYTES:
        return None
    now = time.monotonic()
    activities: list[tuple[float, Activity]] = []
    for place in range(_PHASES):
        since, length, text = _PHASE.unpack_from(content, _PHASES_AT + place * _PHASE.size)
        if since:
            told = text[:length].decode(errors="replace")
            activities.append((since, Activity(text=told, seconds=max(0.0, now - since))))
    positions = [
        _position(now, *_GROUP.unpack_from(content, _GROUPS_AT + place * _GROUP.size)) for place in range(_GROUPS)
    ]
    return Reading(
        owner=owner,
        activities=tuple(activity for _, activity in sorted(activities, key=lambda pair: pair[0])),
        positions=tuple(sorted((found for found in positions if found.count), key=lambda found: found.seconds)),
    )


def _position(  # the fields of `_GROUP`
    now: float, since: float, count: int, inside: int, operation: bytes, group: bytes, ranks: bytes
) -> GroupPosition:
    return GroupPosition(
        group=_text(group),
        count=count,
        operation=_text(operation),
        inside=bool(inside),
        seconds=max(0.0, now - since),
        ranks=_open_ranks(_text(ranks)),
    )


def describe_phase(phase: Phase) -> str:
    """Return name and details of a phase: `update, mini_batch 2`."""
    return ", ".join([phase.name, *(f"{name} {value}" for name, value in phase.details.items())])


def _fields(owner: Owner) -> Mapping[str, object]:
    return {name: getattr(owner, name) for name in ("name", "role", "rank", "pid", "machine", "started")}


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


def _pack_ranks(ranks: tuple[int, ...]) -> bytes:
    """Return ranks as text: evenly spaced ones, as groups of a mesh are, by first, end and step."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if ranks and step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}".encode()
    text = ",".join(map(str, ranks)).encode()
    return text if len(text) <= 88 else b""


def _open_ranks(text: str) -> tuple[int, ...]:
    if ":" in text:
        return tuple(range(*map(int, text.split(":"))))
    return tuple(map(int, text.split(","))) if text else ()
