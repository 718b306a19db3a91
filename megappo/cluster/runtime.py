"""Start of Ray, calls to worker processes, and what is said when one of them fails."""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from megappo.config.cluster import ClusterConfig
from megappo.errors import ConfigError, EngineError, MegappoError, WorkerError
from megappo.observability.logging import get_logger, tail

logger = get_logger(__name__)

_GRACE_S = 8.0
"""After a first failure: how long to wait for the one that caused it (Ray tells of a killed process after ~6 s)."""
_LOG_LINES = 15


@dataclass(kw_only=True, slots=True, frozen=True)
class Call:
    """One outstanding call to one worker process."""

    # Any: the object reference of whatever the method returns.
    ref: Any
    worker: str
    """Role, rank and place, for messages: `actor rank 1 (pid 17 on 10.0.0.1)`."""
    log_paths: tuple[Path, ...]
    """Its logs, the most telling one first."""


def describe_process() -> str:
    """Return where this process runs, for messages: `pid 17 on 10.0.0.1`."""
    return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"


def start_ray(cluster: ClusterConfig, *, num_cpus: int) -> None:
    """Connect to the configured Ray cluster, or start Ray on this machine with `num_cpus` logical CPUs."""
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        _init_ray(cluster, num_cpus=num_cpus)
    except ConnectionError as error:
        raise WorkerError(
            f"cluster.address={cluster.address}: no Ray cluster answers there: {error} "
            "(start one with `ray start --head`, or leave the key out)"
        ) from error
    finally:
        # ray.init puts in a handler that exits the process; a run must get to say what was saved.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)


def _init_ray(cluster: ClusterConfig, *, num_cpus: int) -> None:
    if cluster.address is not None:
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        return
    # A Ray of our own listens on loopback and ends with this process; its token authentication only adds a warning.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",  # never a cluster that happens to run here
        num_cpus=cluster.num_cpus or num_cpus,
        include_dashboard=False,
        object_store_memory=cluster.object_store_bytes,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )


def gather(calls: Sequence[Call], *, phase: str, timeout_s: float) -> list[Any]:
    """Return the results of all calls, in order.

    Raises:
        WorkerError: a worker raised, died, or did not answer within `timeout_s`; names the one that failed first and
            gives its last log lines.
    """
    pending = [call.ref for call in calls]
    deadline = time.monotonic() + timeout_s
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [call for call in calls if call.ref in pending]
            names = ", ".join(call.worker for call in late)
            raise WorkerError(f"{names}: no answer in {phase} within {timeout_s:.0f} s{_log_lines(late[0])}")
        try:
            ray.get(ready[0])
        except RayError:
            raise _explain(calls, phase) from None
    return [ray.get(call.ref) for call in calls]


def _explain(calls: Sequence[Call], phase: str) -> MegappoError:
    """Tell the failure that came first: a dead process makes its peers fail with broken connections."""
    ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=_GRACE_S)
    failures: list[tuple[int, Call, Exception]] = []
    for call in calls:
        try:
            ray.get(call.ref, timeout=0.1)
        except GetTimeoutError:
            continue
        except (RayError, MegappoError) as error:
            failures.append((_rank_of(error), call, error))
    _, call, error = min(failures, key=lambda failure: failure[0])
    return describe_failure(error, call=call, phase=phase)


def _rank_of(error: Exception) -> int:
    """Order causes before consequences: death, our own errors, broken connections."""
    if isinstance(error, RayActorError):
        return 0
    text = str(error)
    return 2 if "Connection reset" in text or "Connection closed" in text else 1


def describe_failure(error: Exception, *, call: Call, phase: str) -> MegappoError:
    """Turn a Ray error of one call into an error that names worker, phase and cause.

    Errors that megappo raised on purpose inside the worker keep their class and gain the worker's name.
    """
    worker = call.worker
    if isinstance(error, RayTaskError) and isinstance(error.cause, MegappoError):
        cause = error.cause
        # A ConfigError carries its violations, which name the key themselves.
        return cause if isinstance(cause, ConfigError) else type(cause)(f"{worker}, {phase}: {cause}")
    if isinstance(error, ActorDiedError | ActorUnavailableError | RayActorError):
        reason = "its process died"
    elif isinstance(error, RayTaskError):
        logger.error("%s failed in %s\n%s", worker, phase, error)
        last_line = str(error).strip().splitlines()[-1]
        reason = f"raised {last_line}"
    else:
        reason = f"{type(error).__name__}: {error}"
    failure = EngineError if worker.startswith("rollout") else WorkerError
    return failure(f"{worker} failed in {phase}: {reason}{_log_lines(call)}")


def _log_lines(call: Call) -> str:
    """Return the last lines of the first log that has some."""
    for path in call.log_paths:
        lines = tail(path, _LOG_LINES)
        if lines:
            return f"\nlast lines of {path}:\n" + "\n".join(f"  | {line}" for line in lines)
    return f" (its log {call.log_paths[0]} is empty or on another node)"
