"""The loss of the critic on one micro-batch.

Shapes: n packed tokens of a micro-batch, m of them on the loss mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algo.kl import widen
from megappo.algo.losses.base import LossOutput, poison
from megappo.config.algorithm import AlgorithmConfig
from megappo.observability import metrics


@dataclass(kw_only=True, slots=True)
class ValueLossBatch:
    """One micro-batch, beside the values of the critic. Entries off the mask may be anything."""

    old_values: Tensor
    """[n] values before the update."""
    returns: Tensor
    """[n] targets."""
    loss_mask: Tensor
    """[n] bool."""
    loss_weights: Tensor
    """[n] float: token_mean of the mini-batch."""


def compute_value_loss(values: Tensor, batch: ValueLossBatch, algorithm: AlgorithmConfig) -> LossOutput:
    """Squared error to the returns, with a bound on the move away from the old value.

    Formula: 1/2 max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2), aggregated as token_mean.
    Source: Schulman et al. 2017, arXiv:1707.06347, section 5; the clip: Engstrom et al. 2020, arXiv:2005.12729.
    Config: value_loss.clip (null: no bound).
    Use: with gae.

    Metrics: `critic/value_clip_fraction` counts tokens with |V - V_old| > c; means are over loss tokens.
    """
    index = batch.loss_mask.nonzero(as_tuple=True)[0]
    current = widen(values[index])
    old, returns = batch.old_values[index].to(current.dtype), batch.returns[index].to(current.dtype)
    weights = batch.loss_weights[index].to(current.dtype)
    error = (current - returns).square()
    moved_far = torch.zeros_like(error, dtype=torch.bool)
    if algorithm.value_loss.clip is not None:
        bound = algorithm.value_loss.clip
        moved_far = (current - old).abs().detach() > bound
        clipped = (old + (current.detach() - old).clamp(-bound, bound) - returns).square()
        error = torch.where(moved_far & (clipped > error), clipped, error)
    loss = (weights * (0.5 * error + poison(current, [old, returns]))).sum()
    numbers = [loss.detach(), weights.sum(), moved_far.sum().to(loss.dtype), current.detach().sum()]
    host = torch.stack(numbers).cpu().numpy()
    found = {
        "critic/value_loss": metrics.mean(host[0], host[1]),
        "critic/values/mean": metrics.mean(host[3], len(index)),
    }
    if algorithm.value_loss.clip is not None:
        found["critic/value_clip_fraction"] = metrics.mean(host[2], len(index))
    return LossOutput(loss=loss, metrics=found)
