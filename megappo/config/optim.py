"""Optimizer and learning-rate schedule of one model."""

from dataclasses import dataclass
from enum import Enum


class ScheduleKind(Enum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """Adam with decoupled weight decay (Megatron's optimizer). All steps are optimizer steps."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from lr / warmup_steps to lr."""
    schedule: ScheduleKind = ScheduleKind.constant
    decay_steps: int | None = None
    """Optimizer step at which min_lr is reached; required by linear and cosine."""
    max_skipped_steps: int = 10
    """Non-finite steps in a row (skipped, weights untouched) after which the run ends with the reason."""
    distributed: bool = False
    """Megatron's distributed optimizer: optimizer state split over the data-parallel ranks."""
