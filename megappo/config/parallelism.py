"""How one model is laid out over devices."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """Layout of one Megatron model. Data parallelism is what is left: devices / (tensor * pipeline * context)."""

    tensor: int = 1
    """Tensor-parallel ranks; must divide attention heads and key/value heads (these are not replicated) and the
    features of dense layers. A vocabulary that it does not divide is padded."""
    pipeline: int = 1
    """Pipeline stages; must divide the number of layers, unless the options below say who holds how many."""
    first_stage_layers: int | None = None
    """Layers of the first stage; the stages without a size of their own share the rest evenly. None: one of those."""
    last_stage_layers: int | None = None
    """Layers of the last stage, likewise: a large vocabulary makes the head as dear as some layers."""
    embedding_is_layer: bool = False
    """Count the embedding as one layer of the first stage, which then holds one layer less than the others."""
    head_is_layer: bool = False
    """Count the head as one layer of the last stage."""
    context: int = 1
    """Context-parallel ranks: each holds 1 / context of the tokens of every sequence. With the local layer spec the
    heads of a tensor-parallel rank must divide among them."""
    expert: int = 1
    """Ranks over which the experts of a layer are spread, data-parallel ones included; must divide their number."""
    expert_tensor: int = 1
    """Ranks that share one expert, each with a shard of its matrices. expert * expert_tensor divides the ranks of a
    pipeline stage, whatever tensor, context and data parallelism make of them."""
    virtual_pipeline: int | None = None
    """Model chunks per pipeline stage (interleaved schedule); None: not interleaved."""
    sequence: bool = False
    """Sequence parallelism: activations of norms and dropout are split over the tensor-parallel ranks."""

    @property
    def model_size(self) -> int:
        """Devices that hold one copy of the model (tensor * pipeline * context)."""
        return self.tensor * self.pipeline * self.context
