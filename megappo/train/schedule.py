"""Learning-rate schedules, counted in optimizer steps that were applied.

Invariants (asserted by tests/train/test_schedule.py):
1. Step `warmup_steps` has the peak rate, and so has step 1 without warm-up.
2. A falling schedule reaches `min_lr` at step `decay_steps` and stays there.
3. wsd keeps the peak up to step `decay_steps - final_decay_steps`.
"""

import math

from megappo.config.optim import DecayShape, OptimConfig, ScheduleKind


def learning_rate_at(config: OptimConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1.

    It rises linearly to `lr` at step `warmup_steps`. After that it is constant, or falls to `min_lr` at step
    `decay_steps`: from the peak on (linear, cosine: Loshchilov and Hutter 2017, arXiv:1608.03983) or over the last
    `final_decay_steps` only (wsd: Hu et al. 2024, arXiv:2404.06395).
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule is ScheduleKind.constant or config.decay_steps is None:
        return config.lr
    first, shape = _decay_of(config, config.decay_steps)
    progress = (step - first) / max(1, config.decay_steps - first)
    return config.min_lr + (config.lr - config.min_lr) * _remaining(shape, min(1.0, max(0.0, progress)))


def _decay_of(config: OptimConfig, last: int) -> tuple[int, DecayShape]:
    """Return the last step at the peak rate and the shape of the fall from there to step `last`."""
    if config.schedule is ScheduleKind.wsd:
        assert config.final_decay_steps is not None, "schedule wsd without final_decay_steps, which a rule refuses"
        return last - config.final_decay_steps, config.final_decay_shape
    shape = DecayShape.cosine if config.schedule is ScheduleKind.cosine else DecayShape.linear
    return max(config.warmup_steps, 1), shape


def _remaining(shape: DecayShape, progress: float) -> float:
    """Return how much of the way from min_lr to lr is left, 1 at progress 0 and 0 at progress 1.

    The shapes are those of Megatron (optimizer_param_scheduler.py:280). `exponential` halves 1 + remaining over the
    whole decay; `minus_sqrt` is the 1 - sqrt of Hagele et al. 2024, arXiv:2405.18392.
    """
    match shape:
        case DecayShape.linear:
            return 1.0 - progress
        case DecayShape.cosine:
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case DecayShape.exponential:
            return 2.0 * 0.5**progress - 1.0
        case DecayShape.minus_sqrt:
            return 1.0 - math.sqrt(progress)
