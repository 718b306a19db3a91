"""Optimizer and learning-rate schedule of one model."""

from dataclasses import dataclass, field
from enum import Enum


class OptimizerName(Enum):
    """Which rule turns a gradient into a step."""

    adam = "adam"
    """Adam with decoupled weight decay (AdamW)."""
    sgd = "sgd"
    """Stochastic gradient descent; weight decay is added to the gradient."""


class ScheduleKind(Enum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    """Warm-up, stable, decay: the peak is held, and only the last `final_decay_steps` fall."""


class DecayShape(Enum):
    """How the final decay of the wsd schedule falls from lr to min_lr."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """Megatron's optimizer. All steps are optimizer steps; a skipped one is none."""

    name: OptimizerName = OptimizerName.adam
    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of a falling schedule."""
    beta1: float = 0.9
    """Adam only, as beta2 and eps."""
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    """SGD only."""
    weight_decay: float = 0.0
    """Of matrices; biases and norms do not decay unless `weight_decay_of` says so."""
    weight_decay_of: dict[str, float] = field(default_factory=dict)
    """Other weight decays, by pattern of the Hugging Face name (`*norm*`, `lm_head.*`). The first that matches counts;
    of parameters fused into one, such as the query, key and value projections, any name may match."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from lr / warmup_steps to lr."""
    schedule: ScheduleKind = ScheduleKind.constant
    decay_steps: int | None = None
    """Optimizer step at which min_lr is reached; required by all schedules but constant."""
    final_decay_steps: int | None = None
    """Optimizer steps of the decay that ends at decay_steps; required by wsd, and for it only."""
    final_decay_shape: DecayShape = DecayShape.linear
    max_skipped_steps: int = 10
    """Non-finite steps in a row (skipped, weights untouched) after which the run ends with the reason."""
    distributed: bool = False
    """Megatron's distributed optimizer: optimizer state split over the data-parallel ranks. Adam only."""
    overlap_grad_reduce: bool = False
    """Sum gradients over the data-parallel ranks bucket by bucket, while backward goes on."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward pass begins; needs distributed and overlap_grad_reduce."""
    overlap_bucket_params: int | None = None
    """Parameters that are summed or gathered at a time; None: Megatron's choice (40 million, more over many ranks)."""
