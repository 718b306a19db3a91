"""Processes of one machine that do a job together, over gloo or NCCL."""

import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from megappo.device.spawned import end_with_parent
from megappo.errors import MegappoError, WorkerError
from megappo.observability.logging import redirect_process_output, tail
from megappo.replay.jobs import RankJob, RankResult

_ADDRESS = "127.0.0.1"

# Any: multiprocessing's connections have another type on each platform.
Pipe = Any


def run_processes(job: RankJob, log_folder: Path) -> list[RankResult]:
    """Do a job in as many processes as its layout has ranks; returns their results, rank 0 first.

    Args:
        log_folder: takes a file per process.

    Raises:
        MegappoError: the first error of a process; the others are ended.
        WorkerError: a process died, or failed in another way; names the rank and the last lines of its log.
    """
    size = job.layout.world_size
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    context = multiprocessing.get_context("spawn")
    logs = [log_folder / f"{job.role}-{rank}.log" for rank in range(size)]
    processes: list[BaseProcess] = []
    pipes: list[Pipe] = []
    with socket.socket() as reserved:
        # Bound without listening: nobody else gets the port, and the first rank's store may listen on it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((_ADDRESS, 0))
        port = reserved.getsockname()[1]
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(job, rank, port, theirs, logs[rank]), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(pipes, logs)
        finally:
            # Their results are here, or nobody wants them: others may wait for the one that failed.
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Pipe], logs: list[Path]) -> list[RankResult]:
    results: dict[int, RankResult] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        for ready in wait(list(waiting)):
            rank = waiting[cast(Pipe, ready)]
            try:
                answer: Any = pipes[rank].recv()  # Any: what was pickled
            except EOFError:
                answer = WorkerError(f"replay: the process of rank {rank} died")
            if isinstance(answer, WorkerError):
                raise WorkerError("\n".join([str(answer), "last lines of its log:", *tail(logs[rank], 15)]))
            if isinstance(answer, MegappoError):
                raise answer
            results[rank] = answer
    return [results[rank] for rank in range(len(pipes))]


def _serve(job: RankJob, rank: int, port: int, pipe: Pipe, log: Path) -> None:
    """Run one rank and send what comes out of it."""
    end_with_parent()
    redirect_process_output(log)
    try:
        answer: RankResult | MegappoError = _join_and_run(job, rank, port)
    except MegappoError as error:
        answer = error
    except Exception:  # the boundary of a process
        answer = WorkerError(f"replay: rank {rank} failed:\n{traceback.format_exc()}")
    pipe.send(answer)
    pipe.close()


def _join_and_run(job: RankJob, rank: int, port: int) -> RankResult:
    # Torch and Megatron wait until the process has its log file and its threads.
    from megappo.device.backend import resolve_backend
    from megappo.device.process_group import destroy, init_distributed, init_model_parallel
    from megappo.replay.ranks import replay_on_rank

    config = job.config
    parallelism = config.actor.parallelism if job.role == "actor" else config.critic.parallelism
    init_distributed(
        rank=rank,
        world_size=job.layout.world_size,
        address=_ADDRESS,
        port=port,
        backend=resolve_backend(config.cluster.device),
        timeout_s=config.cluster.start_timeout_s,
        local_rank=rank,
    )
    init_model_parallel(parallelism, seed=config.seed, timeout_s=config.cluster.call_timeout_s)
    result = replay_on_rank(job)
    destroy()
    return result
