"""Start of Ray, calls to worker processes, and what is said when one of them fails."""

import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from megappo.config.cluster import ClusterConfig
from megappo.errors import ConfigError, EngineError, MegappoError, WorkerError
from megappo.observability.board import SUFFIX, Board, Owner, open_board
from megappo.observability.logging import get_logger, redirect_process_output, tail
from megappo.observability.stacks import show_stacks_on_signal
from megappo.observability.waiting import Wait

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
    """Its logs, the most telling one first; none where the answer is there and is only fetched."""


def node_address(cluster: ClusterConfig) -> str:
    """Return where processes of this machine listen for those of the run: at loopback where all of them are here."""
    return "127.0.0.1" if cluster.address is None else ray.util.get_node_ip_address()


def describe_process() -> str:
    """Return where this process runs, for messages: `pid 17 on 10.0.0.1`."""
    return f"pid {os.getpid()} on {ray.util.get_node_ip_address()}"


def begin_worker(log_path: Path, *, role: str, rank: int, name: str | None = None) -> Board:
    """Begin a worker process: its output goes to its log, and what it does can be seen from outside (the board beside
    the log, stacks at a signal). `name` is for messages; None: `<role> rank <rank>`."""
    redirect_process_output(log_path)
    show_stacks_on_signal()
    return open_board(log_path.with_suffix(SUFFIX), Owner(name=name or f"{role} rank {rank}", role=role, rank=rank))


def start_ray(cluster: ClusterConfig, *, num_cpus: int) -> None:
    """Connect to the configured Ray cluster, or start Ray on this machine with `num_cpus` logical CPUs.

    Raises:
        WorkerError: no cluster answers, or Ray did not start here, twice.
    """
    terminate = signal.getsignal(signal.SIGTERM)
    # What a call fails with is told by whoever waits for it; Ray would print it once more for every other object that
    # the call was to return.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        if cluster.address is None:
            _start_own_ray(cluster, num_cpus=num_cpus)
        else:
            _connect(cluster.address)
    finally:
        # ray.init puts in a handler that exits the process; a run must get to say what was saved.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)


def _connect(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise WorkerError(
            f"cluster.address={address}: no Ray cluster answers there: {error} "
            "(start one with `ray start --head`, or leave the key out)"
        ) from error


def _start_own_ray(cluster: ClusterConfig, *, num_cpus: int) -> None:
    """Start Ray, at the second try if need be: its processes wait 30 s for each other, which a busy machine may miss
    (ray/_private/node.py:428,1405)."""
    # Ray listens on all addresses of this machine, whatever it is told. The key is the run's own: without one Ray would
    # make one that stays in the home folder. It says so in a warning that the logging level below leaves out.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # All processes are on this machine, so that collectives meet on loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    first = _try_to_start(cluster, num_cpus=num_cpus)
    if first is None:
        return
    logger.warning("Ray did not start, trying once more: %s", first)
    if (second := _try_to_start(cluster, num_cpus=num_cpus)) is not None:
        raise WorkerError(
            f"Ray did not start on this machine, nor at a second try: {second} (is it short of CPUs, memory or disk? "
            "Ray's own logs are in /tmp/ray/session_latest/logs; one that `ray start --head` has started is used with "
            "cluster.address=127.0.0.1:6379)"
        ) from second


def _try_to_start(cluster: ClusterConfig, *, num_cpus: int) -> Exception | None:
    """Return None once Ray runs, or why it does not; then none of its processes is left."""
    before = set(psutil.Process().children(recursive=True))
    try:
        ray.init(
            address="local",  # never a cluster that happens to run here
            num_cpus=cluster.num_cpus or num_cpus,
            include_dashboard=False,
            object_store_memory=cluster.object_store_bytes,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except Exception as error:  # whatever the start of a foreign program may raise; Ray has no class of its own for it
        # Ray gives up on what it has started, and that would go on.
        end_processes(list(set(psutil.Process().children(recursive=True)) - before), grace_s=0.0)
        return error
    return None


def end_processes(processes: list[psutil.Process], *, grace_s: float) -> None:
    """Kill what is still alive after `grace_s` (Ray's own processes end by themselves in that time)."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    psutil.wait_procs(alive, timeout=max(grace_s, 1.0))


def gather(calls: Sequence[Call], *, phase: str, timeout_s: float, key: str = "", recovers: bool = False) -> list[Any]:
    """Return the results of all calls, in order.

    Args:
        key: configuration key of `timeout_s`, for messages; empty: it follows from several.
        recovers: whether the caller goes on without those that are late: the wait then ends at its limit, whatever
            `watchdog.on_hang` says.

    Raises:
        WorkerError: a worker raised, died, or did not answer within `timeout_s`; names the one that failed first and
            gives its last log lines.
    """
    outcome = wait_for(calls, phase=phase, timeout_s=timeout_s, key=key, grace_s=_GRACE_S, recovers=recovers)
    if outcome.failed:
        # A dead process makes its peers fail with broken connections.
        first = min(outcome.failed, key=lambda position: (severity(outcome.failed[position]), position))
        raise describe_failure(outcome.failed[first], call=calls[first], phase=phase)
    if outcome.late:
        names = ", ".join(calls[position].worker for position in outcome.late)
        limit = f"{timeout_s:.0f} s" + (f" ({key})" if key else "")
        log_lines = _log_lines(calls[outcome.late[0]])
        raise WorkerError(f"{names}: no answer in {phase} within {limit}{outcome.told}{log_lines}")
    return [ray.get(call.ref) for call in calls]


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcome:
    """What became of some calls, by their positions."""

    failed: dict[int, RayError]
    late: list[int]
    """Not answered in time."""
    limit: str
    """That time, for messages."""
    told: str = ""
    """What the watchdog says of those that are late, to be added to a message."""


def wait_for(
    calls: Sequence[Call],
    *,
    phase: str,
    timeout_s: float,
    key: str,
    grace_s: float,
    recovers: bool,
    on_failure: Callable[[], None] = lambda: None,
) -> Outcome:
    """Wait for all calls; after a first failure, for `grace_s` at most: Ray tells of a killed process seconds after its
    peers have told of broken connections.

    Args:
        recovers: as in `gather`.
        on_failure: called after the first failure, to free those that wait for the failed one.
    """
    position_of = {call.ref: position for position, call in enumerate(calls)}
    pending = list(position_of)
    failed: dict[int, RayError] = {}
    limit, told = f"within {timeout_s:g} s", ""
    grace_ends = math.inf

    def outstanding() -> list[str]:
        return [calls[position_of[ref]].worker for ref in pending]

    with Wait(phase=phase, outstanding=outstanding, limit_s=timeout_s, key=key) as wait:
        while pending:
            left_s = min(wait.left_s, max(0.0, grace_ends - time.monotonic()))
            ready, pending = ray.wait(pending, num_returns=1, timeout=left_s)
            if not ready:
                if not failed:
                    verdict = wait.is_given_up()
                    if verdict.goes_on and not recovers:
                        continue
                    told = verdict.told
                break
            try:
                ray.get(ready[0])
            except RayError as error:
                if not failed:
                    on_failure()
                    if grace_s < wait.left_s:
                        grace_ends = time.monotonic() + grace_s
                        limit = f"within {grace_s:g} s of the first failure"
                failed[position_of[ready[0]]] = error
    return Outcome(failed=failed, late=[position_of[ref] for ref in pending], limit=limit, told=told)


def severity(error: Exception) -> int:
    """Order causes before consequences: 0 for a death, 1 for an error of its own, 2 for a broken connection."""
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
    if not call.log_paths:
        return ""
    for path in call.log_paths:
        lines = tail(path, _LOG_LINES)
        if lines:
            return f"\nlast lines of {path}:\n" + "\n".join(f"  | {line}" for line in lines)
    return f" (its log {call.log_paths[0]} is empty or on another node)"
