"""Training processes: thin shells that fetch their shards, call the trainer and put results into the object store.

Every rank of a group gets the same call. Ranks of one data-parallel rank work on the same shards; only the output
rank (last pipeline stage, first tensor and context rank) returns results, the others return None.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from megappo.batch.fields import concat, empty, select
from megappo.batch.requests import TokenSelection, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.checkpoint.manifest import FileRecord
from megappo.cluster.observed import ObservedProcess
from megappo.cluster.runtime import begin_worker, describe_process, node_address
from megappo.config.run import RunConfig
from megappo.config.watchdog import OnHang
from megappo.observability.metrics import Metrics
from megappo.observability.phases import in_phase, phase
from megappo.weights.buckets import BucketMeta
from megappo.weights.checksums import HeldTensor

if TYPE_CHECKING:  # torch and megatron wait until the process has its log file and its threads
    from megappo.train.actor import ActorTrainer
    from megappo.train.critic import CriticTrainer
    from megappo.train.packed_model import PackedModel
    from megappo.train.trainer import ModelTrainer
    from megappo.weight_sync.transport import SenderSpec, WeightSender


_UNLIMITED_S = 7 * 24 * 3600.0
"""Longest wait in a collective where `watchdog.on_hang` lets a run wait."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerSpec:
    """Who a training process is."""

    role: str
    """actor, critic or reward_model."""
    rank: int
    world_size: int
    log_path: Path


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardCall:
    """One shard as a worker receives it."""

    sequence_ids: list[int]
    # Any: Ray object references, opened by the worker.
    pieces: list[Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class BatchCall:
    """What every experience call of one rank names: its shards."""

    shards: list[ShardCall]


class ModelWorker(ObservedProcess):
    """Base of all processes that hold a part of a Megatron model."""

    trainer: "PackedModel"
    """The model; there after `setup`, which subclasses have."""

    def __init__(self, spec: WorkerSpec, config: RunConfig) -> None:
        board = begin_worker(spec.log_path, role=spec.role, rank=spec.rank)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.spec = spec
        self.config = config
        self._board = board
        self._reserved: socket.socket | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Return this node's address and a port on it that stays reserved until the group has met there.

        The socket is bound and does not listen: the kernel gives its port to nobody else, while torch's store, which
        binds with SO_REUSEADDR, may listen on it.
        """
        address = node_address(self.config.cluster)
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # On all addresses, as the store will listen: a port that is free on one may be taken on another.
        self._reserved.bind(("", 0))
        return address, self._reserved.getsockname()[1]

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def identity(self) -> str:
        """Return where this process runs."""
        return describe_process()

    def node(self) -> str:
        """Return the address of its machine."""
        return node_address(self.config.cluster)

    def device_name(self) -> str:
        """Return what this process's device is called."""
        return self._backend.device_name()

    def describe_layers(self) -> str:
        """Return what layers the model is built of, and which accelerating packages this process finds."""
        from megappo.models.layer_specs import describe_layers

        return describe_layers(self.config.model.layer_spec, self._backend)

    def peak_memory_bytes(self) -> int:
        """Return the most device memory that this process has held."""
        return self._backend.peak_memory_bytes()

    def save_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder (all ranks take part)."""
        self.trainer.save_hf(folder)

    def weight_checksums(self) -> dict[str, str]:
        """Checksums of the weights that this rank sends in an export (all ranks take part)."""
        return self.trainer.weight_checksums()

    def _connect(self, address: str, port: int, parallelism: Any) -> Any:
        """Join the group's world and build its Megatron parallel state; returns the back end. Whoever imports Megatron
        does so afterwards, so that it takes the collectives that are counted."""
        from megappo.device.backend import resolve_backend
        from megappo.device.collectives import count_collectives, record_nccl
        from megappo.device.process_group import init_distributed, init_model_parallel

        backend = resolve_backend(self.config.cluster.device)
        count_collectives(self._board)
        if backend.kind == "cuda":
            record_nccl(self.spec.log_path)
        backend.prepare_megatron()
        init_distributed(
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            address=address,
            port=port,
            backend=backend,
            timeout_s=self.config.cluster.start_timeout_s,
        )
        self._release_port()
        # A run that is to wait on past its limits keeps the processes as they are.
        unlimited = self.config.watchdog.on_hang is OnHang.wait
        timeout_s = _UNLIMITED_S if unlimited else self.config.cluster.call_timeout_s
        init_model_parallel(parallelism, seed=self.config.seed, timeout_s=timeout_s)
        self._backend = backend
        rank, profile = self.spec.rank, self.config.profile
        name, chosen = f"{self.spec.role}-{rank}", rank in profile.ranks
        self.observe_phases(profile, process=name, chosen=chosen, log_path=self.spec.log_path, backend=backend)
        return backend

    def offload(self, *, keep_params: bool) -> None:
        """Move what `offload` names out of device memory."""
        self.trainer.memory.release(keep_params=keep_params)


class TrainingWorker(ModelWorker):
    """Base of the processes whose model is trained."""

    trainer: "ModelTrainer"

    def __init__(self, spec: WorkerSpec, config: RunConfig) -> None:
        super().__init__(spec, config)
        self._shards: dict[tuple[int, ...], RolloutBatch] = {}

    def begin_save(self, folder: str) -> None:
        """Copy the state and begin to write it (all ranks take part)."""
        self.trainer.begin_save(folder)

    def is_written(self) -> bool:
        """Return whether this rank has written its file, or failed to."""
        return self.trainer.checkpoints.is_written()

    def wait_until_written(self) -> None:
        """Wait until this rank has written its file, or failed to."""
        self.trainer.checkpoints.wait_until_written()

    def finish_save(self) -> list[FileRecord]:
        """Make the folder whole (all ranks take part); returns the records of the files that this rank wrote."""
        return self.trainer.checkpoints.finish_save()

    def load(self, folder: str) -> None:
        """Go on from a checkpoint (all ranks take part)."""
        self.trainer.load(folder)

    def _load(self, call: BatchCall) -> RolloutBatch:
        """Return this rank's sequences, shard after shard. The shards of the current step are kept in memory."""
        wanted = {tuple(shard.sequence_ids): shard for shard in call.shards}
        self._shards = {key: batch for key, batch in self._shards.items() if key in wanted}
        for key, shard in wanted.items():
            if key not in self._shards:
                with phase("fetch"):
                    pieces = ray.get(shard.pieces) or [empty(RolloutBatch)]
                self._shards[key] = _in_order(concat(pieces), shard.sequence_ids)
        return concat([self._shards[key] for key in wanted])


def _in_order(batch: RolloutBatch, sequence_ids: Sequence[int]) -> RolloutBatch:
    position = {int(sequence_id): index for index, sequence_id in enumerate(batch.sequence_ids)}
    return select(batch, [position[sequence_id] for sequence_id in sequence_ids])


def split_by_shard(field: TokenField, call: BatchCall) -> list[TokenField]:
    """Cut a rank's result at its shard borders."""
    parts, start = [], 0
    for shard in call.shards:
        stop = start + len(shard.sequence_ids)
        parts.append(select(field, np.arange(start, stop)))
        start = stop
    return parts


def put_all(fields: Sequence[TokenField]) -> list[Any]:
    """Put each field into the object store; returns the references."""
    return [ray.put(field) for field in fields]


class CriticWorker(TrainingWorker):
    """One rank of the critic."""

    trainer: "CriticTrainer"

    def setup(self, address: str, port: int) -> None:
        """Join the world, build the model and load its weights."""
        config = self.config
        backend = self._connect(address, port, config.critic.parallelism)
        from megappo.train.critic import CriticTrainer

        self.trainer = CriticTrainer(config, backend=backend)

    def compute_values(self, call: BatchCall, micro_batches: list[list[int]]) -> tuple[list[Any], Metrics] | None:
        """Values of this rank's sequences, one reference per shard."""
        values, metrics = self.trainer.compute_values(self._load(call), micro_batches)
        return None if values is None else (put_all(split_by_shard(values, call)), metrics)

    def update(self, experience: list[Any], request: UpdateRequest) -> Metrics:
        """Run the update phase on this rank's experience."""
        return self.trainer.update(_fetch(experience), request)


class ActorWorker(TrainingWorker):
    """One rank of the actor; also holds the reference policy and, on output ranks, does the experience maths."""

    trainer: "ActorTrainer"

    def setup(self, address: str, port: int) -> None:
        """Join the world, build the model and load its weights."""
        backend = self._connect(address, port, self.config.actor.parallelism)
        from megappo.train.actor import ActorTrainer

        self.trainer = ActorTrainer(self.config, backend=backend)
        self._sender: WeightSender | None = None
        self._sum_pi_squared: dict[tuple[int, ...], TokenField] = {}

    def compute_log_probs(
        self, call: BatchCall, micro_batches: list[list[int]], *, reference: bool
    ) -> tuple[list[Any], Metrics] | None:
        """Log-probs of this rank's sequences, one reference per shard."""
        fields, metrics = self.trainer.compute_log_probs(self._load(call), micro_batches, reference=reference)
        if fields is None:
            return None
        if fields.sum_pi_squared is not None:
            # Read by build_experience alone, which runs on this rank, too.
            keys = [tuple(shard.sequence_ids) for shard in call.shards]
            self._sum_pi_squared = dict(zip(keys, split_by_shard(fields.sum_pi_squared, call)))
        return put_all(split_by_shard(fields.log_probs, call)), metrics

    @in_phase("experience")
    def compute_token_rewards(self, call: BatchCall, *, kl_coef: float, **per_shard: Any) -> list[tuple[Any, Any]]:
        """Token rewards, shard by shard: (reference of the TokenField, RewardTotals)."""
        from megappo.algo.experience import compute_token_rewards

        results = []
        for index, shard in enumerate(call.shards):
            arguments = {name: _open(values, index) for name, values in per_shard.items()}
            field, totals = compute_token_rewards(
                self._shard(call, shard), algorithm=self.config.algorithm, kl_coef=kl_coef, **arguments
            )
            results.append((ray.put(field), totals))
        return results

    @in_phase("experience")
    def build_experience(self, call: BatchCall, **per_shard: Any) -> list[tuple[Any, Any]]:
        """Experience, shard by shard: (reference of the Experience, ExperienceTotals)."""
        from megappo.algo.experience import build_experience

        results = []
        for index, shard in enumerate(call.shards):
            arguments = {name: _open(values, index) for name, values in per_shard.items()}
            experience, totals = build_experience(
                self._shard(call, shard),
                algorithm=self.config.algorithm,
                sum_pi_squared=self._sum_pi_squared.get(tuple(shard.sequence_ids)),
                **arguments,
            )
            results.append((ray.put(experience), totals))
        return results

    def _shard(self, call: BatchCall, shard: ShardCall) -> RolloutBatch:
        self._load(call)
        return self._shards[tuple(shard.sequence_ids)]

    def read_sequences(self, batches: list[Any], sequence_ids: list[int]) -> list[Any]:
        """The named sequences of each shard."""
        return [select(shard, np.flatnonzero(np.isin(shard.sequence_ids, sequence_ids))) for shard in ray.get(batches)]

    def selection_moments(self, experience: list[Any]) -> list[Any]:
        """Moments of each shard's loss tokens."""
        from megappo.algo.selection import compute_selection_moments, loss_tokens_of

        return [compute_selection_moments(loss_tokens_of(shard)) for shard in ray.get(experience)]

    def selection_keys(self, experience: list[Any], selection: TokenSelection, count: int) -> list[np.ndarray]:
        """The best keys of each shard's loss tokens."""
        from megappo.algo.selection import best_keys, loss_tokens_of

        algorithm = self.config.algorithm
        return [best_keys(loss_tokens_of(shard), selection, algorithm, count=count) for shard in ray.get(experience)]

    def update(self, experience: list[Any], request: UpdateRequest) -> Metrics:
        """Run the update phase on this rank's experience."""
        return self.trainer.update(_fetch(experience), request)

    def plan_export(self) -> tuple[int, bool, bool, list[BucketMeta]]:
        """Return (place of its source among all, whether this rank feeds one, whether it sends, its buckets)."""
        from megappo.models.export import plan_export

        dtype = self.config.rollout.weight_dtype(self.config.model).value
        plan = plan_export(self.trainer.chunks, self.config.weight_sync.bucket_bytes, dtype=dtype)
        return plan.source, plan.takes_part, plan.sends, plan.buckets

    def open_sender(self, spec: "SenderSpec") -> None:
        """Become the sender of a weight source."""
        from megappo.weight_sync import TRANSPORTS

        self._sender = TRANSPORTS.get(self.config.weight_sync.transport).sender(spec)
        self._sender.open()
        self._release_port()

    def close_sender(self) -> None:
        """Stop being a sender; engines that wait for it fail."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    @in_phase("weights")
    def begin_sending(self, wanted: list[HeldTensor]) -> None:
        """Prepare a hand-over and the checksums of some tensors. All ranks that feed a source take part."""
        from megappo.weight_sync import TRANSPORTS
        from megappo.weight_sync.source import WeightSource
        from megappo.weight_sync.transport import Flow

        settings, dtype = self.config.weight_sync, self.config.rollout.weight_dtype(self.config.model).value
        shared = TRANSPORTS.get(settings.transport).flow is Flow.handed
        buckets = self.trainer.export_buckets(settings.bucket_bytes, dtype=dtype, shared=shared)
        self._source = WeightSource(buckets, self._sender, wanted=wanted)

    @in_phase("weights")
    def send_bucket(self) -> dict[int, bytes]:
        """Send one bucket; returns what engine ranks need to open it."""
        return self._source.send_next()

    @in_phase("weights")
    def send_weights(self) -> dict[str, str]:
        """Send, and feed to others, all that is left; returns the wanted checksums of what this rank sent."""
        return self._source.send_rest()

    def drop_weights(self) -> None:
        """Go through all that is left without sending it, so that ranks which feed this one end."""
        self._source.drop_rest()


@in_phase("fetch")
def _fetch(experience: list[Any]) -> Experience:
    return concat(ray.get(experience))


def _open(values: Sequence[Any] | None, index: int) -> Any:
    """Return entry `index`, opened if it is an object reference; None stays None."""
    if values is None:
        return None
    value = values[index]
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value
