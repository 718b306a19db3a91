"""Calls of a hand-over to trainer and engines at once: what each answered, and who is to blame where some failed.

In a broadcast the failure of one is the failure of all, and Ray tells of a killed process seconds after its peers have
told of broken connections. So all answers are waited for, and causes told from consequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from megappo.cluster.runtime import Call, describe_failure, severity, wait_for
from megappo.errors import MegappoError

_GRACE_S = 10.0
"""How long after a first failure the others are waited for."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """One call that failed."""

    engine: int | None
    """Whose it was; None: the trainer's."""
    life: int = 0
    """Number of the engine's process that the attempt was made with."""
    error: MegappoError
    severity: int
    """0: the process died, 1: it failed by itself, 2: a connection broke."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineCall:
    """A call to an engine host."""

    engine: int
    life: int
    """Number of the engine's process that it was made for."""
    call: Call


def settle(
    trainer: Sequence[Call],
    engines: Sequence[EngineCall],
    *,
    phase: str,
    timeout_s: float,
    limit: str = "",
    on_failure: Callable[[], None] = lambda: None,
) -> tuple[list[Any], list[Failure]]:
    """Wait for all calls. After the first failure `on_failure` is called, to free those that wait for the failed one.

    Args:
        limit: where `timeout_s` comes from, for messages.

    Returns:
        The answers of the trainer's calls (only where nothing failed), and the failures.
    """
    calls = [*trainer, *(each.call for each in engines)]
    outcome = wait_for(
        calls,
        phase=phase,
        timeout_s=timeout_s,
        key="weight_sync.timeout_s",
        grace_s=_GRACE_S,
        recovers=True,
        on_failure=on_failure,
    )
    late = dict.fromkeys(outcome.late, TimeoutError(f"no answer {outcome.limit}{limit}{outcome.told}"))
    failures: list[Failure] = []
    for position, error in (outcome.failed | late).items():
        owner = engines[position - len(trainer)] if position >= len(trainer) else None
        failures.append(
            Failure(
                engine=None if owner is None else owner.engine,
                life=0 if owner is None else owner.life,
                error=describe_failure(error, call=calls[position], phase=phase),
                severity=severity(error),
            )
        )
    return [] if failures else [ray.get(call.ref) for call in trainer], failures


def causes(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures that caused the others."""
    worst = min(failure.severity for failure in failures)
    return [failure for failure in failures if failure.severity == worst]
