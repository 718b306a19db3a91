"""Typed groups of training processes: the Ray side of the actor and critic ports."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray

from megappo.algo.experience import ExperienceTotals, RewardTotals
from megappo.algo.selection import SelectionMoments
from megappo.balance.layout import RankLayout
from megappo.batch.fields import Packed, concat
from megappo.batch.refs import Ref
from megappo.batch.requests import TokenSelection, UpdateRequest
from megappo.batch.stages import Experience, TokenField
from megappo.cluster.observed import Ask
from megappo.cluster.pending_save import GroupSave
from megappo.cluster.placement import Slot
from megappo.cluster.runtime import Call, gather
from megappo.cluster.workers import ActorWorker, BatchCall, CriticWorker, ModelWorker, ShardCall, WorkerSpec
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.controller.ports import Plan, Shard
from megappo.observability.metrics import Metrics, merge


def layout_of(parallelism: ParallelismConfig, num_devices: int) -> RankLayout:
    """Return the mesh of a model on so many devices."""
    return RankLayout(
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        context=parallelism.context,
        data=num_devices // parallelism.model_size,
        virtual_pipeline=parallelism.virtual_pipeline or 1,
    )


class TrainingGroup:
    """The processes of one role, rank 0 first."""

    def __init__(  # the composition root names every part
        self,
        worker_class: type[ModelWorker],
        config: RunConfig,
        *,
        role: str,
        parallelism: ParallelismConfig,
        slots: Sequence[Slot],
        log_dir: Path,
    ) -> None:
        self.layout = layout_of(parallelism, len(slots))
        self.role = role
        sections = {"actor": config.actor, "critic": config.critic, "reward_model": config.reward_model}
        self._offload = sections[role].offload
        self._start_timeout_s = config.cluster.start_timeout_s
        self._timeout_s = config.cluster.call_timeout_s
        self._log_paths = [log_dir / f"{role}-{rank}.log" for rank in range(len(slots))]
        self._places = ["starting"] * len(slots)
        self.num_updates = 0
        """Update phases begun: by then the weights are others."""
        self.workers: list[Any] = []
        for rank, slot in enumerate(slots):
            spec = WorkerSpec(role=role, rank=rank, world_size=len(slots), log_path=self._log_paths[rank])
            self.workers.append(ray.remote(worker_class).options(**slot.options()).remote(spec, config))

    def start(self) -> list[Call]:
        """Begin to build the models; returns the calls to wait for."""
        self._places = self._gather_start(self.calls("identity"))
        address, port = self._gather_start([self.call(0, "rendezvous")])[0]
        return self.calls("setup", address, port)

    def _gather_start(self, calls: Sequence[Call]) -> list[Any]:
        return gather(calls, phase="start", timeout_s=self._start_timeout_s, key="cluster.start_timeout_s")

    def _gather(self, calls: Sequence[Call], method: str) -> list[Any]:
        """Return the results of calls to this role; `runtime.gather`."""
        return gather(calls, phase=method, timeout_s=self._timeout_s, key="cluster.call_timeout_s")

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Call:
        """Start one method on one rank."""
        ref = getattr(self.workers[rank], method).remote(*args, **kwargs)
        return Call(
            ref=ref, worker=f"{self.role} rank {rank} ({self._places[rank]})", log_paths=(self._log_paths[rank],)
        )

    def calls(self, method: str, *args: Any, **kwargs: Any) -> list[Call]:
        """Start one method with the same arguments on every rank."""
        return [self.call(rank, method, *args, **kwargs) for rank in range(len(self.workers))]

    def run(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run one method with the same arguments on every rank and wait."""
        return self._gather(self.calls(method, *args, **kwargs), method)

    def observed(self) -> dict[str, Ask]:
        """Return how to ask each process what it does, by name."""
        return {f"{self.role}_{rank}": partial(self.call, rank) for rank in range(len(self.workers))}

    def device_name(self) -> str | None:
        """Return what the devices of all ranks are called; None when they differ."""
        names = set(self.run("device_name"))
        return names.pop() if len(names) == 1 else None

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank (Megatron's order: tensor, context, data, pipeline)."""
        inner = self.layout.tensor * self.layout.context
        return rank // inner % self.layout.data

    def output_rank(self, data_rank: int) -> int:
        """Return the global rank that returns the results of a data-parallel rank."""
        inner = self.layout.tensor * self.layout.context
        return inner * (data_rank + self.layout.data * (self.layout.pipeline - 1))

    def per_data_rank(self, items: Sequence[Any], data_rank: int) -> list[Any]:
        """Return the entries (one per shard) that a data-parallel rank works on."""
        share = len(items) // self.layout.data
        return list(items[data_rank * share : (data_rank + 1) * share])

    def batch_call(self, shards: Sequence[Shard], data_rank: int) -> BatchCall:
        """Return the shards of a data-parallel rank as its workers receive them."""
        mine = self.per_data_rank(shards, data_rank)
        return BatchCall(shards=[ShardCall(sequence_ids=s.sequence_ids, pieces=list(s.pieces)) for s in mine])

    def run_by_data_rank(self, method: str, *arguments: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Run one method on all ranks and wait; returns what the output rank of each data-parallel rank answers.

        Args:
            arguments: of every argument one entry per data-parallel rank.

        Raises:
            WorkerError: a rank failed, died or did not answer in time.
        """
        calls = []
        for rank in range(len(self.workers)):
            data_rank = self.data_rank(rank)
            calls.append(self.call(rank, method, *(argument[data_rank] for argument in arguments), **kwargs))
        results = self._gather(calls, method)
        return [results[self.output_rank(data_rank)] for data_rank in range(self.layout.data)]

    def run_pass(
        self, method: str, shards: Sequence[Shard], plan: Plan, **kwargs: Any
    ) -> tuple[list[Ref[TokenField]], Metrics]:
        """Run a forward pass on all ranks; returns one reference per shard and the merged metrics."""
        batch_calls = [self.batch_call(shards, data_rank) for data_rank in range(self.layout.data)]
        outputs = self.run_by_data_rank(method, batch_calls, plan, **kwargs)
        return [ref for refs, _ in outputs for ref in refs], merge(metrics for _, metrics in outputs)

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        """Run the update phase; metrics of all output ranks merged."""
        self.num_updates += 1
        batches = [self.per_data_rank(experience, data_rank) for data_rank in range(self.layout.data)]
        return merge(self.run_by_data_rank("update", batches, requests))

    def offload(self, *, keep_params: bool = False) -> None:
        """Move what the role's `offload` section names out of device memory; no call is made when it names nothing."""
        if self._offload.params or self._offload.grads or self._offload.optimizer:
            self.run("offload", keep_params=keep_params)

    def save(self, folder: str, *, asynchronous: bool = False) -> GroupSave:
        """Write the role's checkpoint into an existing folder; with `asynchronous`, return once the state is copied."""
        self.run("begin_save", folder)
        pending = GroupSave(self)
        if not asynchronous:
            pending.wait()
        return pending

    def load(self, folder: str) -> None:
        """Read the role's checkpoint from a folder."""
        self.run("load", folder)

    def save_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        self.run("save_hf", folder)

    def weight_checksums(self) -> dict[str, str]:
        """Checksum of every weight, by its Hugging Face name."""
        return {name: found for part in self.run("weight_checksums") for name, found in part.items()}

    def stop(self) -> None:
        """End all processes at once."""
        for worker in self.workers:
            ray.kill(worker)


class CriticGroup(TrainingGroup):
    """The critic's processes (port: CriticClient)."""

    def __init__(self, config: RunConfig, *, slots: Sequence[Slot], log_dir: Path) -> None:
        super().__init__(
            CriticWorker,
            config,
            role="critic",
            parallelism=config.critic.parallelism,
            slots=slots,
            log_dir=log_dir,
        )

    def compute_values(self, shards: Sequence[Shard], plan: Plan) -> tuple[list[Ref[TokenField]], Metrics]:
        """Values before each sampled token, one reference per shard."""
        return self.run_pass("compute_values", shards, plan)


class ActorGroup(TrainingGroup):
    """The actor's processes (port: ActorClient)."""

    def __init__(self, config: RunConfig, *, slots: Sequence[Slot], log_dir: Path) -> None:
        super().__init__(
            ActorWorker,
            config,
            role="actor",
            parallelism=config.actor.parallelism,
            slots=slots,
            log_dir=log_dir,
        )

    def compute_log_probs(
        self, shards: Sequence[Shard], plan: Plan, *, reference: bool = False
    ) -> tuple[list[Ref[TokenField]], Metrics]:
        """Log-probs of the sampled tokens, one reference per shard."""
        return self.run_pass("compute_log_probs", shards, plan, reference=reference)

    def compute_token_rewards(
        self, shards: Sequence[Shard], *, kl_coef: float, **per_shard: Sequence[Any] | None
    ) -> tuple[list[Ref[TokenField]], list[RewardTotals]]:
        """Token rewards of every shard; see the port for the arguments."""
        results = self._experience_call("compute_token_rewards", shards, per_shard, kl_coef=kl_coef)
        return [ref for ref, _ in results], cast(list[RewardTotals], [totals for _, totals in results])

    def build_experience(
        self, shards: Sequence[Shard], **per_shard: Sequence[Any] | None
    ) -> tuple[list[Ref[Experience]], list[ExperienceTotals]]:
        """Experience of every shard; see the port for the arguments."""
        results = self._experience_call("build_experience", shards, per_shard)
        return [ref for ref, _ in results], cast(list[ExperienceTotals], [totals for _, totals in results])

    def _experience_call(
        self, method: str, shards: Sequence[Shard], per_shard: dict[str, Sequence[Any] | None], **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Run experience maths on the output rank of each data-parallel rank."""
        calls = []
        for data_rank in range(self.layout.data):
            mine = {
                name: None if values is None else self.per_data_rank(values, data_rank)
                for name, values in per_shard.items()
            }
            call = self.batch_call(shards, data_rank)
            calls.append(self.call(self.output_rank(data_rank), method, call, **mine, **kwargs))
        return [pair for pairs in self._gather(calls, method) for pair in pairs]

    def read_sequences(self, batches: Sequence[Ref[Packed]], sequence_ids: Sequence[int]) -> Packed:
        """Some sequences of a step, shard after shard."""
        return concat(cast(list[Packed], self._shard_call("read_sequences", batches, list(sequence_ids))))

    def selection_moments(self, experience: Sequence[Ref[Experience]]) -> list[SelectionMoments]:
        """Moments of each shard's loss tokens."""
        return self._shard_call("selection_moments", experience)

    def selection_keys(
        self, experience: Sequence[Ref[Experience]], selection: TokenSelection, count: int
    ) -> list[np.ndarray]:
        """The best keys of each shard's loss tokens."""
        return self._shard_call("selection_keys", experience, selection, count)

    def _shard_call(self, method: str, batches: Sequence[Ref[Any]], *args: Any) -> list[Any]:
        """Run a method that returns one result per shard on the output rank of each data-parallel rank."""
        calls = [
            self.call(self.output_rank(data_rank), method, self.per_data_rank(batches, data_rank), *args)
            for data_rank in range(self.layout.data)
        ]
        return [part for parts in self._gather(calls, method) for part in parts]
