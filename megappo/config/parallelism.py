"""How one model is laid out over devices."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """Layout of one Megatron model. Data parallelism is what is left: devices / (tensor * pipeline * context)."""

    tensor: int = 1
    """Tensor-parallel ranks; must divide attention heads and key/value heads."""
    pipeline: int = 1
    """Pipeline stages; must divide the number of layers."""
    context: int = 1
    """Context-parallel ranks."""
    expert: int = 1
    """Expert-parallel ranks."""
    expert_tensor: int = 1
    """Tensor-parallel ranks inside an expert."""
    virtual_pipeline: int | None = None
    """Model chunks per pipeline stage (interleaved schedule); None: not interleaved."""
    sequence: bool = False
    """Sequence parallelism: activations of norms and dropout are split over the tensor-parallel ranks."""

    @property
    def model_size(self) -> int:
        """Devices that hold one copy of the model (tensor * pipeline * context)."""
        return self.tensor * self.pipeline * self.context
