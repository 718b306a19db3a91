"""How engines are, in words, for reports of hangs."""

import time
from collections.abc import Callable, Sequence

from megappo.cluster.engine_keeper import EngineKeeper

HeldBy = Callable[[int], Sequence[tuple[int, int, float]]]
"""Number of an engine -> the groups that it has: id, data row, and since when, by `time.monotonic`."""

_SHOWN = 4
"""Most groups that a line names."""


def describe_engines(keepers: Sequence[EngineKeeper], held_by: HeldBy) -> list[str]:
    """Say how every engine is and what it has to do."""
    return [_describe(keeper, held_by(keeper.index)) for keeper in keepers]


def busy_engines(keepers: Sequence[EngineKeeper], held_by: HeldBy) -> list[str]:
    """Say the same of those that have something to do, or of all where none has."""
    busy = [keeper for keeper in keepers if held_by(keeper.index)]
    return describe_engines(busy or keepers, held_by)


def _describe(keeper: EngineKeeper, held: Sequence[tuple[int, int, float]]) -> str:
    now = time.monotonic()
    well = "" if keeper.well_at is None else f", last well {now - keeper.well_at:.1f} s ago"
    if not held:
        return f"{keeper.name}: {keeper.state.value}, no prompts{well}"
    groups = shown([f"{group} (data row {row})" for group, row, _ in held])
    oldest_s = now - min(since for _, _, since in held)
    return f"{keeper.name}: {keeper.state.value}, has groups {groups} for up to {oldest_s:.1f} s{well}"


def shown(names: Sequence[str]) -> str:
    """Join the first few of some names."""
    more = len(names) - _SHOWN
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_SHOWN])} and {more} more"
