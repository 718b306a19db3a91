"""What a report of a hang says: who waits for whom, who is probably to blame, and where everybody is."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megappo.observability.behind import Behind, find_behind
from megappo.observability.board import describe_phase
from megappo.observability.phases import Phase
from megappo.observability.processes import GONE, Seen

_MOMENT_S = 1.0
"""Ranks wait for each other all the time, for moments."""
_NAMED = 6
"""Most names in a line."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WaitSeen:
    """A wait of the driver when the report was made."""

    phase: str
    thread: str
    seconds: float
    quiet_s: float
    limit_s: float | None
    key: str
    outstanding: Sequence[str]


@dataclass(kw_only=True, slots=True, frozen=True)
class Facts:
    """Everything that a report is made of."""

    why: str
    of: WaitSeen | None
    """The wait that is reported; None: somebody asked."""
    waits: Sequence[WaitSeen]
    phases: Sequence[Phase]
    """Of the driver."""
    processes: Sequence[Seen]
    parts: Mapping[str, Sequence[str]]
    """How engines, rewards and others are, in lines."""
    suspect: str = field(init=False)
    """Who is probably to blame, in words; empty: nobody stands out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "suspect", _find_suspect(self))


def _find_suspect(facts: Facts) -> str:
    """Name, in this order: a rank that holds others up in a collective; a process that is stopped or gone; who has not
    answered, with what it does."""
    alive = {one.owner.name for one in facts.processes if one.state != GONE}
    by_role: dict[str, dict[int, Seen]] = {}
    for one in facts.processes:
        if one.state != GONE or one.owner.name not in alive:  # else it was started anew
            by_role.setdefault(one.owner.role, {})[one.owner.rank] = one
    late = [
        (behind.at.seconds, _describe_behind(behind, ranks))
        for ranks in by_role.values()
        for behind in find_behind({rank: one.positions for rank, one in ranks.items()})
        if behind.at.seconds >= _MOMENT_S
    ]
    if late:
        return max(late)[1]
    candidates = [one for ranks in by_role.values() for one in ranks.values()]
    waited_for = [] if facts.of is None else [_find(name, candidates) for name in facts.of.outstanding]
    asked = [one for one in waited_for if one is not None]
    if still := [one for one in (*asked, *candidates) if one.state]:
        return f"{_name(still[0])}, whose process is {still[0].state}"
    if asked:
        doing = f", which is in {_doing(asked[0])}" if asked[0].activities else ""
        return f"{_name(asked[0])}{doing}"
    return "" if facts.of is None or not facts.of.outstanding else facts.of.outstanding[0]


def _describe_behind(behind: Behind, ranks: Mapping[int, Seen]) -> str:
    one, at = ranks[behind.rank], behind.at
    others = _listed([f"rank {rank}" for rank in behind.waiting])
    verb = "waits" if len(behind.waiting) == 1 else "wait"
    what = f"number {at.count} ({at.operation}) of group {at.group}, in which {others} {verb} for {at.seconds:.1f} s"
    if behind.in_circle:
        return f"{_name(one)}, which waits elsewhere for one of those that wait for it: it has not entered {what}"
    state = f"; its process is {one.state}" if one.state else ""
    doing = f"; it is in {_doing(one)}" if one.activities else ""
    return f"{_name(one)}, which has not entered {what}{state}{doing}"


def _find(name: str, processes: Sequence[Seen]) -> Seen | None:
    """Return the process that a name in a message is of: `actor rank 1 (pid 17 on 10.0.0.1)`."""
    return next((one for one in processes if f"{name} ".startswith(f"{one.owner.name} ")), None)


def _name(one: Seen) -> str:
    return f"{one.owner.name} (pid {one.owner.pid})"


def _doing(one: Seen) -> str:
    """Say in which phases a process is, the newest with its time."""
    return f"{' > '.join(text for text, _ in _phases_of(one))} for {_phases_of(one)[-1][1]:.1f} s"


def _phases_of(one: Seen) -> list[tuple[str, float]]:
    """Return phases with the seconds of the oldest of their kind; a process may be in the same one several times."""
    kinds: dict[str, list[float]] = {}
    for activity in one.activities:
        kinds.setdefault(activity.text, []).append(activity.seconds)
    return [
        (text if len(seconds) == 1 else f"{len(seconds)} x {text}", max(seconds)) for text, seconds in kinds.items()
    ]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_NAMED])} and {more} more"


def head_of(facts: Facts) -> list[str]:
    """Return the few lines that say most."""
    lines = [facts.why]
    if facts.of is not None and facts.of.outstanding:
        lines.append(f"waits for {_listed(facts.of.outstanding)}")
    if facts.suspect:
        lines.append(f"probably to blame: {facts.suspect}")
    return lines


def text_of(facts: Facts) -> str:
    """Return a whole report."""
    sections = [
        [time.strftime("Hang report of %Y-%m-%d %H:%M:%S"), *head_of(facts)],
        ["Waits of the driver", *_indented(_wait_lines(facts.waits) or ["none"])],
        ["Phases of the driver", *_indented([_phase_line(one) for one in facts.phases] or ["none"])],
        ["Processes", *_indented([line for one in facts.processes for line in _process_lines(one)] or ["none"])],
        *([part, *_indented(lines or ["none"])] for part, lines in facts.parts.items()),
        ["Stacks", *(line for one in facts.processes for line in _stack_lines(one))],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _wait_lines(waits: Sequence[WaitSeen]) -> list[str]:
    lines: list[str] = []
    for wait in waits:
        limit = "its parts have limits" if wait.limit_s is None else f"limit {wait.limit_s:g} s"
        key = f" ({wait.key})" if wait.key else ""
        news = f", last news {wait.quiet_s:.1f} s ago" if wait.seconds - wait.quiet_s >= _MOMENT_S else ""
        lines.append(f"{wait.phase} (thread {wait.thread}): {wait.seconds:.1f} s{news}, {limit}{key}")
        lines += [f"  for {name}" for name in wait.outstanding]
    return lines


def _phase_line(one: Phase) -> str:
    return f"{describe_phase(one)} (thread {one.thread}): {one.seconds:.1f} s"


def _process_lines(one: Seen) -> list[str]:
    owner = one.owner
    state = one.state or "runs or waits"
    lines = [f"{owner.name}  pid {owner.pid} on {owner.machine.split()[0]}: {state}, {one.cpu:.2f} CPUs, {one.title}"]
    lines += [f"  in {text} for {seconds:.1f} s" for text, seconds in _phases_of(one)]
    if one.positions:
        newest = one.positions[0]
        verb = "inside" if newest.inside else "last began"
        lines.append(
            f"  {verb} number {newest.count} ({newest.operation}) of group {newest.group} "
            f"(ranks {', '.join(map(str, newest.ranks)) or 'unknown'}), {newest.seconds:.1f} s ago"
        )
    for child in one.children:
        lines.append(f"  child pid {child.pid}: {child.state or 'runs or waits'}, {child.command:.100}")
    return lines


def _stack_lines(one: Seen) -> list[str]:
    lines = [f"== {_name(one)}: {one.stacks.how or 'none'}", *one.stacks.lines]
    for child in one.children:
        if child.stacks.how:
            lines += [f"== child {child.pid} of {one.owner.name}: {child.stacks.how}", *child.stacks.lines]
    return lines
