"""Where the weights of a model lie: over the ranks of a trainer and over those of an engine. Pure arithmetic.

Ranks of a trainer are numbered as Megatron does: within a pipeline stage tensor first, then context and data; for
experts, over the same ranks, expert-tensor first, then expert (megatron/core/parallel_state.py:417).

Invariants (asserted by tests/weights/test_plan.py and, against Megatron, tests/models/test_export.py):
1. The chunks of all stages hold every layer once.
2. The parts of a dimension over the ranks of a trainer are disjoint and cover it.
3. The parts over the ranks of an engine cover it; they overlap for key/value heads only.
"""

from dataclasses import dataclass

from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import place_of_layers
from megappo.weights.cuts import shard_range
from megappo.weights.name_map import NameTable, Size

_VOCABULARY_MULTIPLE = 64
"""SGLang pads a vocabulary to a multiple of this, or of this times its ranks (vocab_parallel_embedding.py:273)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelWeights:
    """What says which tensors a model has, and their shapes."""

    table: NameTable
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    has_value_head: bool = False
    """Whether it ends with a value head instead of an output layer (a critic)."""
    num_experts: int = 0
    """Experts of a sparse layer; 0: all layers are dense."""
    expert_ffn_hidden_size: int = 0
    dense_layers: tuple[int, ...] = ()
    """Layers without experts, where there are experts."""

    def lengths(self) -> dict[Size, int]:
        """Return the length of each kind of dimension."""
        return {
            Size.hidden: self.hidden_size,
            Size.queries: self.num_attention_heads * self.head_dim,
            Size.keys: self.num_key_value_heads * self.head_dim,
            Size.head: self.head_dim,
            Size.ffn: self.ffn_hidden_size,
            Size.expert_ffn: self.expert_ffn_hidden_size,
            Size.experts: self.num_experts,
            Size.vocabulary: self.vocab_size,
            Size.one: 1,
        }


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerLayout:
    """A trainer's ranks; the fields are those of `ParallelismConfig`, without what moves no weights."""

    world_size: int
    """All ranks, data-parallel replicas included."""
    tensor: int = 1
    pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_is_layer: bool = False
    head_is_layer: bool = False
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int | None = None

    @staticmethod
    def of(parallelism: ParallelismConfig, world_size: int) -> "TrainerLayout":
        """Return the layout of a configuration over that many ranks."""
        return TrainerLayout(
            world_size=world_size,
            tensor=parallelism.tensor,
            pipeline=parallelism.pipeline,
            first_stage_layers=parallelism.first_stage_layers,
            last_stage_layers=parallelism.last_stage_layers,
            embedding_is_layer=parallelism.embedding_is_layer,
            head_is_layer=parallelism.head_is_layer,
            expert=parallelism.expert,
            expert_tensor=parallelism.expert_tensor,
            virtual_pipeline=parallelism.virtual_pipeline,
        )

    def first_rank(self, stage: int) -> int:
        """Return the first rank of a pipeline stage."""
        return stage * (self.world_size // self.pipeline)

    def stage_of_layers(self, num_layers: int) -> list[int]:
        """Return the pipeline stage of each layer."""
        return [stage for stage, _ in place_of_layers(self, num_layers)]

    def tensor_ranks(self, stage: int) -> list[int]:
        """Return the ranks that hold the first copy of a stage's tensors, by shard, experts apart."""
        first = self.first_rank(stage)
        return list(range(first, first + self.tensor))

    def expert_ranks(self, stage: int, expert_rank: int) -> list[int]:
        """Return the ranks that hold the first copy of one expert-parallel rank's experts of a stage, by shard."""
        first = self.first_rank(stage) + self.expert_tensor * expert_rank
        return list(range(first, first + self.expert_tensor))


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineLayout:
    """One SGLang engine (0.5.23), which fuses and cuts the tensors by itself."""

    tensor: int = 1
    """Ranks over which it cuts the model; experts are cut, too, none is on one rank alone."""

    def part(self, size: Size | None, length: int, *, rank: int, num_key_value_heads: int) -> range:
        """Return what a rank holds of the dimension along which a tensor is cut.

        Args:
            size: what the dimension is; None: the tensor is not cut.
        """
        if size is None:
            return range(length)
        if size is Size.vocabulary:
            part = shard_range(self.padded_vocabulary(length), rank=rank, size=self.tensor)
            return range(min(part.start, length), min(part.stop, length))
        if size is Size.keys and self.tensor > num_key_value_heads:
            head = rank // (self.tensor // num_key_value_heads)
            return shard_range(length, rank=head, size=num_key_value_heads)
        return shard_range(length, rank=rank, size=self.tensor)

    def padded_vocabulary(self, length: int) -> int:
        """Return the rows of all ranks together for a vocabulary, those of padding included."""
        multiple = _VOCABULARY_MULTIPLE
        if -(-length // multiple) * multiple % self.tensor:
            multiple *= self.tensor
        return -(-length // multiple) * multiple


ONE_RANK = EngineLayout()
"""An engine that holds all tensors whole."""
