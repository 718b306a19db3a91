"""Steps of which all ranks must learn whether one failed, so that none waits for another."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megappo.errors import CheckpointError, MegappoError, StorageError

T = TypeVar("T")


def run_together(action: Callable[[], T], *, then: Callable[[list[T]], None] | None = None) -> T:
    """Run a step of reading or writing files on every rank of the default world, then `then` on rank 0 with the results
    of all ranks. Returns this rank's result once all of it has succeeded everywhere.

    Without `then` the results stay where they are; with it rank 0 gets them pickled.

    Raises:
        MegappoError: on every rank, what the first rank raised that failed; a CheckpointError names the rank, where
            there are several.
        StorageError: likewise, where that is no MegappoError.
    """
    rank = dist.get_rank()
    result, cause = _attempt(action)
    outcome = (None if then is None else result, cause and _told(cause, rank))
    outcomes: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None  # Any: pairs as `outcome`
    dist.gather_object(outcome, outcomes, dst=0)
    verdict: list[MegappoError | None] = [None]
    if outcomes is not None:
        verdict = [next((failure for _, failure in outcomes if failure is not None), None)]
        if verdict == [None] and then is not None:
            _, cause = _attempt(lambda: then([value for value, _ in outcomes]))
            verdict = [cause and _told(cause, 0)]
    dist.broadcast_object_list(verdict, src=0)
    if (failure := verdict[0]) is not None:
        raise failure from None if failure is cause else cause
    return result  # type: ignore[return-value]  # it is there where nothing failed


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except (
        Exception
    ) as error:  # whatever it is, the other ranks must not wait for this one; raised again, with its rank
        return None, error


def _told(error: Exception, rank: int) -> MegappoError:
    """Return what all ranks raise."""
    if isinstance(error, MegappoError) and not isinstance(error, CheckpointError):
        return error
    known = isinstance(error, CheckpointError)
    reason = str(error) if known else f"{type(error).__name__}: {error}"
    if dist.get_world_size() > 1:
        reason = f"rank {rank}: {reason}"
    return type(error)(reason) if known else StorageError(reason)
