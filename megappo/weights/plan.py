"""The plan of a hand-over: which ranks of the trainer feed which tensor of the engines, in which bucket. Pure.

One source per rank that exports: the first of each pipeline stage, for the tensors of the stage, and with experts the
first of the ranks that hold each expert-parallel rank's experts. A source gathers the tensor-parallel shards of one
bucket at a time and has whole tensors, as an engine's loader wants them. So no rank ever holds the model.

Invariants (asserted by tests/weights/test_plan.py):
1. Every Hugging Face tensor of the model is in one bucket of one source; a tied output layer is no tensor.
2. The pieces of a tensor are disjoint and cover it; the pieces of a replicated one are one.
3. A rank is the sender of one source at most, and senders ascend with their sources. Ranks that work through the
   sources in order, and engines that ask in that order, never wait for each other in a circle.
4. No rank holds more beside its weights than twice the bucket limit, or twice the largest tensor.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megappo.config.engine_rules import EngineCuts, engine_violations
from megappo.errors import ConfigError
from megappo.weights.buckets import BucketMeta, TensorMeta, plan_buckets
from megappo.weights.cuts import shard_range
from megappo.weights.layouts import ONE_RANK, EngineLayout, ModelWeights, TrainerLayout
from megappo.weights.name_map import EMBEDDING, OUTPUT, VALUE_HEAD, NameRule, Partition, RuleUse, Size, expand_rules


@dataclass(kw_only=True, slots=True, frozen=True)
class Piece:
    """What one rank of the trainer holds of a tensor: positions `start` to `stop` of the dimension that is cut."""

    rank: int
    start: int
    stop: int


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedTensor:
    """One Hugging Face tensor."""

    meta: TensorMeta
    partition: Partition
    cut: Size | None
    """What the dimension is that is cut; None: every rank holds all of the tensor."""
    pieces: tuple[Piece, ...]
    merges_adapter: bool
    """Whether it is the sum of a weight and the update of an adapter, made piece by piece."""

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def length(self) -> int:
        """Length of the dimension that is cut; 1 where none is."""
        return 1 if self.partition.value is None else self.meta.shape[self.partition.value]

    def bytes_of(self, positions: int) -> int:
        """Return the bytes of that many positions of the dimension that is cut."""
        return self.meta.num_bytes // self.length * positions

    def shape_of(self, piece: Piece) -> list[int]:
        """Return the shape of a piece."""
        dim = self.partition.value
        return [piece.stop - piece.start if at == dim else length for at, length in enumerate(self.meta.shape)]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedBucket:
    """Tensors that are gathered and sent together."""

    meta: BucketMeta
    tensors: tuple[PlannedTensor, ...]
    ranks: tuple[int, ...]
    """The ranks that hold their shards, by shard; the first is the sender."""
    is_of_experts: bool
    """Whether `ranks` share experts, or else all other tensors. No bucket has both."""

    def pieces_of(self, rank: int) -> list[tuple[PlannedTensor, Piece]]:
        """Return what a rank feeds, in order."""
        return [(tensor, piece) for tensor in self.tensors for piece in tensor.pieces if piece.rank == rank]

    def bytes_of(self, rank: int) -> int:
        """Return the bytes that a rank feeds."""
        return sum(tensor.bytes_of(piece.stop - piece.start) for tensor, piece in self.pieces_of(rank))


@dataclass(kw_only=True, frozen=True)
class WeightSource:
    """One exporting rank and what it hands over."""

    stage: int
    """Pipeline stage."""
    expert_rank: int | None
    """Expert-parallel rank whose experts it has; 0 has all other tensors of the stage, too. None: a dense model."""
    sender: int
    """Its rank in the trainer."""
    buckets: tuple[PlannedBucket, ...]
    """In the order of the hand-over."""

    @property
    def metas(self) -> list[BucketMeta]:
        """What an engine must know of the buckets."""
        return [bucket.meta for bucket in self.buckets]

    @property
    def ranks(self) -> set[int]:
        """All ranks that feed it, the sender included."""
        return {rank for bucket in self.buckets for rank in bucket.ranks}

    @property
    def num_bytes(self) -> int:
        return sum(bucket.meta.num_bytes for bucket in self.buckets)

    @cached_property
    def bucket_buffer(self) -> int:
        """Bytes of the buffer in which the sender puts buckets together: those of the largest."""
        return max(bucket.meta.num_bytes for bucket in self.buckets)

    @cached_property
    def part_buffers(self) -> dict[int, int]:
        """Most bytes of a bucket that each other rank feeds."""
        return {
            rank: max(bucket.bytes_of(rank) for bucket in self.buckets if rank in bucket.ranks)
            for rank in sorted(self.ranks - {self.sender})
        }

    @cached_property
    def receive_buffer(self) -> int:
        """Most bytes of a bucket that the sender gets from all other ranks."""
        own = (bucket.bytes_of(self.sender) for bucket in self.buckets)
        return max(bucket.meta.num_bytes - held for bucket, held in zip(self.buckets, own))


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightPlan:
    """The whole hand-over."""

    model: ModelWeights
    trainer: TrainerLayout
    engine: EngineLayout
    bucket_bytes: int
    """Most bytes of a bucket that holds more than one tensor."""
    sources: tuple[WeightSource, ...]
    """In the order of the hand-over."""

    def source_of(self, rank: int) -> int | None:
        """Return the index of the source that a rank sends; None: it sends none."""
        return next((index for index, source in enumerate(self.sources) if source.sender == rank), None)


@lru_cache(maxsize=8)
def plan_weights(
    model: ModelWeights,
    trainer: TrainerLayout,
    *,
    bucket_bytes: int,
    dtype: str,
    engine: EngineLayout = ONE_RANK,
    adapted: tuple[str, ...] = (),
) -> WeightPlan:
    """Plan the hand-over of a model.

    Args:
        trainer: must suit the model (`megappo.config.layout_rules`).
        bucket_bytes: bytes gathered and sent at a time.
        dtype: `float32` or `bfloat16`, in which the tensors travel.
        adapted: matrices with an update that is merged on the way, such as q_proj (`LoraConfig.targets`).

    Raises:
        ConfigError: the engine's ranks do not suit the model or the trainer's layout.
    """
    cuts = EngineCuts(
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        ffn_hidden_size=model.ffn_hidden_size if not model.num_experts or model.dense_layers else None,
        expert_ffn_hidden_size=model.expert_ffn_hidden_size if model.num_experts else None,
    )
    shards = {"tensor": trainer.tensor} | ({"expert_tensor": trainer.expert_tensor} if model.num_experts else {})
    if violations := engine_violations(engine.tensor, cuts, trainer=shards):
        raise ConfigError(violations)
    return WeightPlan(
        model=model,
        trainer=trainer,
        engine=engine,
        bucket_bytes=bucket_bytes,
        sources=tuple(_sources(model, trainer, bucket_bytes, dtype, adapted)),
    )


def _sources(
    model: ModelWeights, trainer: TrainerLayout, bucket_bytes: int, dtype: str, adapted: Sequence[str]
) -> list[WeightSource]:
    held = _tensors_by_holder(model, trainer, _TensorPlanner(model, dtype, adapted))
    sources: list[WeightSource] = []
    for stage in range(trainer.pipeline):
        for expert_rank in range(trainer.expert if model.num_experts else 1):
            ranks = trainer.expert_ranks(stage, expert_rank)
            buckets: list[PlannedBucket] = []
            if expert_rank == 0:
                buckets += _buckets(held[stage, None], bucket_bytes, trainer.tensor_ranks(stage))
            buckets += _buckets(held[stage, expert_rank], bucket_bytes, ranks, is_of_experts=True)
            if buckets:
                sources.append(
                    WeightSource(
                        stage=stage,
                        expert_rank=expert_rank if model.num_experts else None,
                        sender=ranks[0],
                        buckets=tuple(buckets),
                    )
                )
    return sources


def _tensors_by_holder(
    model: ModelWeights, trainer: TrainerLayout, planner: "_TensorPlanner"
) -> Mapping[tuple[int, int | None], list[PlannedTensor]]:
    """Return the tensors of each (stage, expert-parallel rank; None: those that are of no expert)."""
    held: defaultdict[tuple[int, int | None], list[PlannedTensor]] = defaultdict(list)
    stages = trainer.stage_of_layers(model.num_layers)
    for use in exported_parameters(model):
        if use.layer is None:
            stage = 0 if use.hugging_face == [EMBEDDING] else trainer.pipeline - 1
        else:
            stage = stages[use.layer]
        if use.expert is None:
            held[stage, None] += planner.tensors(use, trainer.tensor_ranks(stage))
        else:
            expert_rank = use.expert // (model.num_experts // trainer.expert)
            held[stage, expert_rank] += planner.tensors(use, trainer.expert_ranks(stage, expert_rank))
    return held


def exported_parameters(model: ModelWeights) -> list[RuleUse]:
    """Return the parameters that are handed over, in the order of the model's layers."""
    left_out = {OUTPUT if model.has_value_head else VALUE_HEAD}
    if model.tied_embeddings:
        left_out.add(OUTPUT)
    uses = expand_rules(model.table, model.num_layers, num_experts=model.num_experts, dense_layers=model.dense_layers)

    def place(use: RuleUse) -> int:
        if use.layer is not None:
            return use.layer
        return -1 if use.hugging_face == [EMBEDDING] else model.num_layers

    return sorted((use for use in uses if left_out.isdisjoint(use.hugging_face)), key=place)


class _TensorPlanner:
    """Makes the tensors of parameters. Shapes and pieces are the same for all layers and experts on the same ranks."""

    def __init__(self, model: ModelWeights, dtype: str, adapted: Sequence[str]) -> None:
        self._lengths = model.lengths()
        self._dtype = dtype
        self._adapted = adapted
        self._known: dict[tuple[int, int], list[tuple[list[int], tuple[Piece, ...]]]] = {}

    def tensors(self, use: RuleUse, ranks: Sequence[int]) -> list[PlannedTensor]:
        """Return the tensors of one parameter, whose shards the ranks hold in this order."""
        rule = use.rule
        key = id(rule), ranks[0]
        if key not in self._known:
            self._known[key] = [self._cut(rule, sizes, ranks) for sizes in rule.shapes]
        tensors: list[PlannedTensor] = []
        for name, sizes, (shape, pieces) in zip(use.hugging_face, rule.shapes, self._known[key]):
            *_, module, kind = name.split(".")
            tensors.append(
                PlannedTensor(
                    meta=TensorMeta(name=name, shape=shape, dtype=self._dtype),
                    partition=rule.partition,
                    cut=None if rule.partition.value is None else sizes[rule.partition.value],
                    pieces=pieces,
                    merges_adapter=kind == "weight" and module in self._adapted,
                )
            )
        return tensors

    def _cut(self, rule: NameRule, sizes: Sequence[Size], ranks: Sequence[int]) -> tuple[list[int], tuple[Piece, ...]]:
        """Return a tensor's shape and who holds which piece."""
        shape = [self._lengths[size] for size in sizes]
        dim = rule.partition.value
        if dim is None:
            return shape, (Piece(rank=ranks[0], start=0, stop=1),)
        parts = [shard_range(shape[dim], rank=shard, size=len(ranks)) for shard in range(len(ranks))]
        return shape, tuple(
            Piece(rank=rank, start=part.start, stop=part.stop) for rank, part in zip(ranks, parts) if len(part)
        )


def _buckets(
    tensors: Sequence[PlannedTensor], bucket_bytes: int, ranks: Sequence[int], *, is_of_experts: bool = False
) -> list[PlannedBucket]:
    named = {tensor.name: tensor for tensor in tensors}
    return [
        PlannedBucket(
            meta=meta,
            tensors=tuple(named[name] for name in meta.names),
            ranks=tuple(ranks),
            is_of_experts=is_of_experts,
        )
        for meta in plan_buckets([tensor.meta for tensor in tensors], bucket_bytes)
    ]
