"""Processes of one machine that replay a job together, over gloo or NCCL."""

import os
from functools import partial
from pathlib import Path

from megappo.device.spawned import ADDRESS, run_spawned
from megappo.replay.jobs import RankJob, RankResult


def run_processes(job: RankJob, log_folder: Path) -> list[RankResult]:
    """Do a job in as many processes as its layout has ranks; returns their results, rank 0 first.

    Args:
        log_folder: takes a file per process.

    Raises:
        MegappoError: as `run_spawned`.
    """
    size = job.layout.world_size
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    logs = [log_folder / f"{job.role}-{rank}.log" for rank in range(size)]
    return run_spawned(partial(_join_and_run, job), size, logs=logs)


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
        address=ADDRESS,
        port=port,
        backend=resolve_backend(config.cluster.device),
        timeout_s=config.cluster.start_timeout_s,
        local_rank=rank,
    )
    init_model_parallel(parallelism, seed=config.seed, timeout_s=config.cluster.call_timeout_s)
    result = replay_on_rank(job)
    destroy()
    return result
