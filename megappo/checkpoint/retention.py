"""Which checkpoints of a run are kept.

Invariants (asserted by tests/checkpoint/test_retention.py):
1. The newest `keep_last` whole ones stay, so does every one of a multiple of `keep_every`, the best, and the one that
   the pointer names.
2. A damaged one is no copy: it counts for nothing, and leaves once `keep_last` whole ones are newer.
3. Where there is a whole one, a whole one stays.
"""

import math
from collections.abc import Collection, Mapping

from megappo.config.checkpoint import BestMode, CheckpointConfig


def reasons_to_keep(
    whole: Collection[int], keep: CheckpointConfig, *, best: int | None, pointed: int | None
) -> dict[int, list[str]]:
    """Return, for the steps of the whole checkpoints that stay, why.

    Args:
        best: step of the best one, if any has a value.
        pointed: step that the pointer names, if it names one.
    """
    kept: dict[int, list[str]] = {}
    last = sorted(whole)[-keep.keep_last :]
    for step in sorted(whole):
        why = {
            "last": step in last,
            f"every {keep.keep_every}": keep.keep_every is not None and step % keep.keep_every == 0,
            f"best {keep.keep_best}": step == best,
            "latest": step == pointed,
        }
        if reasons := [name for name, holds in why.items() if holds]:
            kept[step] = reasons
    return kept


def steps_to_delete(
    whole: Collection[int],
    damaged: Collection[int],
    keep: CheckpointConfig,
    *,
    best: int | None = None,
    pointed: int | None = None,
) -> list[int]:
    """Return the steps whose checkpoints leave, oldest first. Arguments as for `reasons_to_keep`."""
    kept = reasons_to_keep(whole, keep, best=best, pointed=pointed)
    enough = sorted(whole)[-keep.keep_last] if len(whole) >= keep.keep_last else None
    outdated = [step for step in damaged if enough is not None and step < enough and step != pointed]
    return sorted([step for step in whole if step not in kept] + outdated)


def best_step(values: Mapping[int, float], whole: Collection[int], mode: BestMode) -> int | None:
    """Return the step with the best value, the newer one of equals; None where no whole checkpoint has a value."""
    sign = 1 if mode is BestMode.max else -1
    ranked = [(sign * values[step], step) for step in whole if not math.isnan(values.get(step, math.nan))]
    return max(ranked)[1] if ranked else None
