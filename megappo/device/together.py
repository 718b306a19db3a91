"""Steps of which all ranks must learn whether one failed, so that none waits for another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megappo.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")


def run_together(action: Callable[[], T], *, then: Callable[[list[T]], None] | None = None) -> T:
    """Run a step of reading or writing files on every rank of the default world, then `then` on rank 0 with the results
    of all ranks. Returns this rank's result once all of it has succeeded everywhere.

    Without `then` the results stay where they are; with it rank 0 gets them pickled.

    Raises:
        CheckpointError: on every rank, with the rank and the reason of the first one that failed; a
            DamagedCheckpointError where that is what failed.
    """
    rank = dist.get_rank()
    result, cause = _attempt(action)
    outcome = (None if then is None else result, cause and _Failure.of(cause, rank))
    outcomes: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None  # Any: pairs as `outcome`
    dist.gather_object(outcome, outcomes, dst=0)
    verdict: list[_Failure | None] = [None]
    if outcomes is not None:
        verdict = [next((failure for _, failure in outcomes if failure is not None), None)]
        if verdict == [None] and then is not None:
            _, cause = _attempt(lambda: then([value for value, _ in outcomes]))
            verdict = [cause and _Failure.of(cause, 0)]
    dist.broadcast_object_list(verdict, src=0)
    if (failure := verdict[0]) is not None:
        kind = DamagedCheckpointError if failure.is_damage else CheckpointError
        raise kind(failure.reason) from cause
    return result  # type: ignore[return-value]  # it is there where nothing failed


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except (
        Exception
    ) as error:  # whatever it is, the other ranks must not wait for this one; raised again, with its rank
        return None, error


@dataclass(slots=True, frozen=True)
class _Failure:
    """What the other ranks learn of a failure."""

    reason: str
    is_damage: bool

    @classmethod
    def of(cls, error: Exception, rank: int) -> "_Failure":
        known = isinstance(error, CheckpointError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(f"rank {rank}: {reason}", isinstance(error, DamagedCheckpointError))
