"""The actor of a run in two dresses: ranks that torchrun started (or one process alone), and Ray workers.

Both give the same calls, which return when all ranks are done: `log_probs(work)`, `update(work)`, `export_weights()`.
"""

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar, cast

import ray
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.training.workload import TrainingWork, rollouts_of
from megappo.balance.layout import RankLayout
from megappo.batch.refs import Ref
from megappo.batch.stages import Experience, RolloutBatch
from megappo.cluster.session import Session
from megappo.config.run import RunConfig
from megappo.controller.ports import Shard
from megappo.device import process_group
from megappo.device.backend import Backend
from megappo.train.actor import ActorTrainer

T = TypeVar("T")


@dataclass(kw_only=True, slots=True, frozen=True)
class LaunchedRank:
    """Who this process is: what torchrun says of it, or the only rank."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def of_environment(cls) -> "LaunchedRank":
        """Read torchrun's variables (they are its protocol); without them this is the only rank."""
        env = os.environ
        # torchrun itself may listen at the port that it tells.
        taken = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=int(env.get("MASTER_PORT", "0")) + taken,  # 0: any free one, since nobody else joins
        )


class Actor(Protocol):
    """What is measured. Made as a context manager; leaving it ends what was started."""

    layout: RankLayout

    def __enter__(self) -> "Actor": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def log_probs(self, work: TrainingWork) -> None:
        """Run the forward pass over all sequences."""
        ...

    def update(self, work: TrainingWork) -> None:
        """Run the update phase."""
        ...

    def export_weights(self) -> None:
        """Put all weights into buckets as for a hand-over, which no engine takes."""
        ...

    def device_name(self) -> str | None:
        """What all devices are called; None when they differ."""
        ...

    def peak_memory_bytes(self) -> Sequence[int]:
        """Most memory that each rank has held."""
        ...


class RankActor:
    """This process's rank of the actor; all ranks make the same calls."""

    def __init__(self, config: RunConfig, *, backend: Backend, layout: RankLayout, launched: LaunchedRank) -> None:
        self._config, self._backend, self._launched = config, backend, launched
        self.layout = layout

    def __enter__(self) -> "RankActor":
        launched, cluster = self._launched, self._config.cluster
        process_group.init_distributed(
            rank=launched.rank,
            world_size=launched.world_size,
            address=launched.address,
            port=launched.port,
            backend=self._backend,
            timeout_s=cluster.start_timeout_s,
            local_rank=launched.local_rank,
        )
        parallelism = self._config.actor.parallelism
        process_group.init_model_parallel(parallelism, seed=self._config.seed, timeout_s=cluster.call_timeout_s)
        self._data_rank = parallel_state.get_data_parallel_rank()
        if self._backend.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._trainer = ActorTrainer(self._config, backend=self._backend)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # else other ranks may be in a collective: torchrun ends them
            del self._trainer
            gc.collect()  # modules and hooks name each other
            if self._backend.kind == "cuda":
                torch.cuda.empty_cache()
            process_group.destroy()

    def log_probs(self, work: TrainingWork) -> None:
        self._trainer.compute_log_probs(rollouts_of(work.shard(self._data_rank)), work.plan[self._data_rank])
        self._finish()

    def update(self, work: TrainingWork) -> None:
        self._trainer.update(work.shard(self._data_rank), work.requests[self._data_rank])
        self._finish()

    def export_weights(self) -> None:
        settings, dtype = self._config.weight_sync, self._config.rollout.weight_dtype(self._config.model).value
        for _ in self._trainer.export_buckets(settings.bucket_bytes, dtype=dtype, shared=False):
            pass
        self._finish()

    def _finish(self) -> None:
        if self._backend.kind == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def device_name(self) -> str | None:
        names = set(self._gather(self._backend.device_name()))
        return names.pop() if len(names) == 1 else None

    def peak_memory_bytes(self) -> Sequence[int]:
        return self._gather(self._backend.peak_memory_bytes())

    def _gather(self, value: T) -> list[T]:
        found: list[T] = [value] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


@dataclass(kw_only=True, slots=True, frozen=True)
class _Handles:
    """The work of every data-parallel rank in the object store."""

    shards: list[Shard]
    experience: list[Ref[Experience]]


class RayActor:
    """The actor's Ray workers, seen from the driver."""

    def __init__(self, config: RunConfig, *, backend: Backend, layout: RankLayout, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._session = Session(config, backend=backend, log_dir=log_dir, report=lambda _: None)
        self.layout = layout
        self._handles: dict[int, _Handles] = {}

    def __enter__(self) -> "RayActor":
        try:
            self._session.start_actor()
        except BaseException:
            self._session.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    def log_probs(self, work: TrainingWork) -> None:
        self._session.actor.compute_log_probs(self._open(work).shards, work.plan)

    def update(self, work: TrainingWork) -> None:
        self._session.actor.update(self._open(work).experience, work.requests)

    def export_weights(self) -> None:
        self._session.actor.run("begin_sending", [])
        self._session.actor.run("drop_weights")

    def _open(self, work: TrainingWork) -> _Handles:
        """Put the work into the object store, once."""
        if id(work) not in self._handles:
            parts = [work.shard(data_rank) for data_rank in range(self.layout.data)]
            self._handles[id(work)] = _Handles(
                shards=[
                    Shard(sequence_ids=ids, pieces=[cast(Ref[RolloutBatch], ray.put(rollouts_of(part)))])
                    for ids, part in zip(work.shards, parts)
                ],
                experience=[self._session.put(part) for part in parts],
            )
        return self._handles[id(work)]

    def device_name(self) -> str | None:
        return self._session.actor.device_name()

    def peak_memory_bytes(self) -> Sequence[int]:
        return self._session.actor.run("peak_memory_bytes")
