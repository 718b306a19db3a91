"""What is kept in device memory: recomputed activations, and what moves to the host between phases."""

from dataclasses import dataclass, field
from enum import Enum


class RecomputeGranularity(Enum):
    """How much of the forward pass is computed again in backward instead of being kept."""

    none = "none"
    selective = "selective"
    """The modules named in `modules`, in every layer."""
    full = "full"
    """Whole layers."""


class RecomputeMethod(Enum):
    """Which layers full recomputation takes."""

    uniform = "uniform"
    """All layers, in runs of `num_layers`: only the input of a run is kept."""
    block = "block"
    """The first `num_layers` of every stage, each by itself; the others keep their activations."""


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    """Activation recomputation of a trained model. It changes memory and time, never a number."""

    granularity: RecomputeGranularity = RecomputeGranularity.none
    method: RecomputeMethod = RecomputeMethod.uniform
    """Full only."""
    num_layers: int = 1
    """Full only; see `method`."""
    modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """Selective only: core_attn, mlp (of dense layers), moe (router, dispatch and experts)."""


@dataclass(kw_only=True, slots=True)
class OffloadConfig:
    """What a model's workers move out of device memory between their phases; what a phase needs comes back first.

    For devices shared with engines or another model. On a CPU the same copies are made between two places in memory.
    """

    params: bool = False
    grads: bool = False
    """Gradient buffers are freed, not copied: every step begins with zeros."""
    optimizer: bool = False
    """Optimizer state and fp32 master weights."""
