"""The processes of `benchmarks.weight_sync`: ranks of a trainer with a real model, ranks of an engine that copy."""

import gc
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import peak_above, start_peak
from megappo.config.model import ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.device.process_group import init_distributed, init_model_parallel, init_named_group, named_group
from megappo.models.architecture import ModelArchitecture
from megappo.models.rope import Rope
from megappo.models.weight_shapes import weights_of
from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.engine_shards import EngineShard, engine_shards
from megappo.weights.layouts import EngineLayout, TrainerLayout
from megappo.weights.plan import PlannedTensor, WeightPlan, plan_weights
from megappo.weights.shared_bucket import open_shared_bucket, share_bucket
from megappo.weights.transforms import split

TRAINERS, ENGINES = 4, 2
_LAYOUT = ParallelismConfig(tensor=TRAINERS)
_GROUP = "weights"
_WAIT_S = 600.0


@dataclass(kw_only=True, frozen=True)
class Sizes:
    """Size of the model (Llama's architecture, fp32, 406 MB) and of a bucket."""

    num_layers: int = 8
    hidden_size: int = 1024
    ffn_hidden_size: int = 2688
    vocab_size: int = 7080
    bucket_bytes: int = 32 * 1024**2

    def describe(self) -> dict[str, object]:
        return asdict(self)

    def architecture(self) -> ModelArchitecture:
        return ModelArchitecture(
            family="llama",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=self.hidden_size // 16,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=128,
            rope=Rope(theta=1e4),
            rms_norm_eps=1e-6,
            qkv_bias=False,
            qk_norm=False,
            tied_embeddings=False,
        )

    def plan(self) -> WeightPlan:
        return plan_weights(
            weights_of(self.architecture()),
            TrainerLayout.of(_LAYOUT, TRAINERS),
            bucket_bytes=self.bucket_bytes,
            dtype="float32",
            engine=EngineLayout(tensor=ENGINES),
        )


@dataclass(kw_only=True, frozen=True)
class Answer:
    """What one process has to say of one hand-over."""

    peak_bytes: int = 0
    """Highest resident size above that at the start."""
    calls: int = 0
    """Buckets that it sent."""
    received_bytes: int = 0
    checksum: int = 0
    """Of all that an engine rank holds afterwards."""


class World:
    """All processes, idle but for `run`."""

    def __init__(self, sizes: Sizes) -> None:
        context = get_context("spawn")
        ports = [_free_port(), _free_port()]
        links = [context.Pipe() for _ in range(ENGINES)]
        targets = [
            (_TrainerRank, (rank, ports, sizes, [own for own, _ in links] if rank == 0 else []))
            for rank in range(TRAINERS)
        ]
        targets += [(_EngineRank, (rank, ports, sizes, link)) for rank, (_, link) in enumerate(links)]
        self._pipes: list[Connection] = []
        for role, arguments in targets:
            pipe, other = context.Pipe()
            context.Process(target=_serve, args=(role, other, arguments), daemon=True).start()
            self._pipes.append(pipe)  # type: ignore[arg-type]  # Windows has another class
        self._answers()

    def run(self, kind: str, *, checked: bool = False) -> list[Answer]:
        """Hand the weights over once; returns the answers of the trainer's ranks, then of the engine's.

        Args:
            kind: ipc, broadcast or full_gather.
            checked: measure peaks and take checksums, which costs CPU time of its own.
        """
        for pipe in self._pipes:
            pipe.send((kind, checked))
        return self._answers()

    def _answers(self) -> list[Answer]:
        answers: list[Answer] = []
        for pipe in self._pipes:
            if not pipe.poll(_WAIT_S):
                raise TimeoutError(f"a process of the benchmark did not answer within {_WAIT_S:g} s")
            answers.append(pipe.recv())
        return answers


def _serve(role: "type[_TrainerRank] | type[_EngineRank]", pipe: Connection, arguments: tuple[Any, ...]) -> None:
    """Run a process: each request names a method."""
    member = role(*arguments)
    gc.freeze()  # what was imported is not looked through while a hand-over is timed
    pipe.send(Answer())
    while True:
        try:
            kind, checked = pipe.recv()
        except EOFError:
            return
        if checked:
            member.forget()
        before = start_peak() if checked else 0
        answer = getattr(member, kind)()
        if checked:
            answer = replace(answer, peak_bytes=peak_above(before), checksum=member.checksum())
        pipe.send(answer)


class _TrainerRank:
    """One tensor-parallel rank; the first one sends."""

    def __init__(self, rank: int, ports: list[int], sizes: Sizes, engines: list[Connection]) -> None:
        from megappo.models.build import Head, build_model
        from megappo.models.random_weights import draw_random_weights

        init_distributed(
            rank=rank, world_size=TRAINERS, address="127.0.0.1", port=ports[0], backend=CPU, timeout_s=_WAIT_S
        )
        init_model_parallel(_LAYOUT, seed=0)
        self._sizes = sizes
        self._engines = engines
        self._chunks = build_model(
            sizes.architecture(), model=ModelConfig(), parallelism=_LAYOUT, head=Head.language_model, backend=CPU
        )
        draw_random_weights(self._chunks)
        self.forget()
        if engines:
            _join(0, ports[1])

    def forget(self) -> None:
        """Start as before the first hand-over, without memory that one keeps for the next."""
        from megappo.models.export import WeightExport

        self._export = WeightExport(self._chunks, self._sizes.bucket_bytes)
        self._shared_export = WeightExport(self._chunks, self._sizes.bucket_bytes, shared=True)

    def ipc(self) -> Answer:
        """As weight_sync.transport=ipc: one bucket after the other in memory that engines open."""
        calls = 0
        for meta, flat in self._shared_export.buckets():
            self._hand(meta, flat)
            calls += 1
        self._end()
        return Answer(calls=calls)

    def broadcast(self) -> Answer:
        """As weight_sync.transport=broadcast."""
        calls = 0
        for meta, flat in self._export.buckets():
            for engine in self._engines:
                engine.send(meta)
            dist.broadcast(flat, src=0, group=named_group(_GROUP))
            calls += 1
        self._end()
        return Answer(calls=calls)

    @torch.no_grad()
    def full_gather(self) -> Answer:
        """Every rank gathers the whole model, tensor by tensor; then the first shares each tensor."""
        from megappo.models.parameters import mapped_parameters

        state: dict[str, torch.Tensor] = {}
        for chunk in self._chunks:
            for parameter, mapped in mapped_parameters(chunk):
                for part, name in enumerate(mapped.hugging_face):
                    own = split(mapped.transform, parameter, part, num_groups=1, queries_per_group=4)
                    own = (own.flatten(0, 1) if own.dim() > parameter.dim() else own).contiguous()
                    state[name] = own
                    if mapped.partition.value is not None:
                        shards = [torch.empty_like(own) for _ in range(TRAINERS)]
                        dist.all_gather(shards, own)
                        state[name] = torch.cat(shards, mapped.partition.value)
        if self._engines:
            for name, tensor in state.items():
                flat = tensor.flatten().view(torch.uint8)
                meta = BucketMeta(names=[name], shapes=[list(tensor.shape)], dtype="float32", num_bytes=tensor.nbytes)
                self._hand(meta, flat)
        self._end()
        return Answer()

    def checksum(self) -> int:
        """A trainer's weights stay as they are."""
        return 0

    def _hand(self, meta: BucketMeta, flat: torch.Tensor) -> None:
        """Give every engine rank a bucket to open, and wait until they have copied."""
        for engine in self._engines:
            engine.send(share_bucket(meta, flat))
        for engine in self._engines:
            engine.recv()

    def _end(self) -> None:
        for engine in self._engines:
            engine.send(None)


class _EngineRank:
    """One rank of the engine, with the parameters that it holds."""

    def __init__(self, rank: int, ports: list[int], sizes: Sizes, sender: Connection) -> None:
        self._sender = sender
        plan = sizes.plan()
        self._shards: dict[str, tuple[PlannedTensor, EngineShard]] = {
            tensor.name: (tensor, engine_shards(plan, tensor)[rank])
            for source in plan.sources
            for bucket in source.buckets
            for tensor in bucket.tensors
        }
        shapes: dict[str, list[int]] = {}
        for tensor, shard in self._shards.values():
            shape = list(tensor.meta.shape)
            if tensor.partition.value is not None:
                shape[tensor.partition.value] = shard.stop - shard.start
            held = shapes.setdefault(shard.name, [0, *shape[1:]])
            held[0] = max(held[0], shard.offset + shape[0])
        self._parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._places = {name: self._place(*planned) for name, planned in self._shards.items()}
        _join(1 + rank, ports[1])

    def forget(self) -> None:
        """An engine keeps nothing."""

    def ipc(self) -> Answer:
        return self._receive(open_shared_bucket)

    full_gather = ipc

    def broadcast(self) -> Answer:
        return self._receive(self._take)

    def _receive(self, get: Callable[[Any], dict[str, torch.Tensor]]) -> Answer:
        """`get` makes the tensors of a bucket from what the sender says of it."""
        received = 0
        while (message := self._sender.recv()) is not None:
            for name, whole in get(message).items():
                received += self._copy(name, whole)
            if get is open_shared_bucket:
                self._sender.send(True)
        return Answer(received_bytes=received)

    def checksum(self) -> int:
        """Return a sum over all that this rank holds."""
        return sum(int(held.view(torch.int32).sum(dtype=torch.int64)) for held in self._parameters.values())

    def _take(self, meta: BucketMeta) -> dict[str, torch.Tensor]:
        flat = torch.empty(meta.num_bytes, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=named_group(_GROUP))
        return open_bucket(meta, flat)

    def _place(self, tensor: PlannedTensor, shard: EngineShard) -> torch.Tensor:
        """Return the part of a parameter that a tensor fills."""
        rows = shard.stop - shard.start if tensor.partition.value == 0 else tensor.meta.shape[0]
        return self._parameters[shard.name][shard.offset : shard.offset + rows]

    def _copy(self, name: str, whole: torch.Tensor) -> int:
        """Copy this rank's part of a tensor into its place; returns the bytes."""
        tensor, shard = self._shards[name]
        dim = tensor.partition.value
        part = whole if dim is None else whole.narrow(dim, shard.start, shard.stop - shard.start)
        self._places[name].copy_(part)
        return part.nbytes


def _join(rank: int, port: int) -> None:
    init_named_group(
        name=_GROUP,
        address="127.0.0.1",
        port=port,
        world_size=1 + ENGINES,
        rank=rank,
        backend=CPU,
        timeout_s=_WAIT_S,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
