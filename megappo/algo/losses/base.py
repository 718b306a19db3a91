"""What a policy loss is given and gives back.

Shapes: n packed tokens of a micro-batch, b whole sequences in it, m of the n tokens on the loss mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algo.kl import EXPONENT_LIMIT
from megappo.config.algorithm import PolicyLossConfig
from megappo.config.algorithm_declarations import LossDeclaration
from megappo.observability.metrics import Metrics


@dataclass(kw_only=True, slots=True)
class PolicyLossBatch:
    """One micro-batch of whole sequences, beside the log-probs of the policy. Entries off the mask may be anything."""

    offsets: Tensor
    """[b+1] int64."""
    loss_mask: Tensor
    """[n] bool."""
    loss_weights: Tensor
    """[n] float: weight of each token in the loss of the mini-batch."""
    advantages: Tensor
    """[n], whitened."""
    old_log_probs: Tensor | None = None
    """[n]; None: the detached log-probs of the policy itself."""
    ref_log_probs: Tensor | None = None
    """[n]; needed by KL in loss."""
    rollout_log_probs: Tensor | None = None
    """[n]; for a metric only."""
    correction_weights: Tensor | None = None
    """[n]."""
    entropy: Tensor | None = None
    """[n], with gradient; needed by an entropy bonus."""
    selected: Tensor | None = None
    """[n] bool: the tokens selected once per update (clip_cov, kl_cov)."""
    is_first_step: bool = False
    """Whether no optimizer step came since old_log_probs: then log-probs must still be equal, and a metric says so."""


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """The micro-batch's part of the loss (a scalar tensor with gradient) and its metrics."""

    loss: Tensor
    metrics: Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class LossInputs:
    """The tokens on the loss mask, in at least fp32."""

    log_probs: Tensor
    """[m], with gradient."""
    old_log_probs: Tensor
    """[m]."""
    advantages: Tensor
    """[m]."""
    sequence: Tensor
    """[m] int64: row of the sequence of each token."""
    num_sequences: int
    selected: Tensor | None = None
    """[m] bool."""

    def ratio(self) -> Tensor:
        """Return exp(clamp(log_probs - old_log_probs, -20, 20)), [m]."""
        return (self.log_probs - self.old_log_probs).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return at each token the mean of values [m] over the loss tokens of its sequence, [m]."""
        zeros = values.new_zeros(self.num_sequences)
        sums = zeros.index_add(0, self.sequence, values)
        counts = zeros.index_add(0, self.sequence, torch.ones_like(values))
        return (sums / counts.clamp(min=1.0))[self.sequence]


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenLosses:
    """Loss per token and what the metrics need."""

    losses: Tensor
    """[m], with gradient."""
    ratio: Tensor | None = None
    """[m], detached: the ratio that the loss uses."""
    clipped: Tensor | None = None
    """[m] bool: where a clip binds, so that the gradient is cut."""
    dual_clipped: Tensor | None = None
    """[m] bool."""


PolicyLossFunction = Callable[[LossInputs, PolicyLossConfig], TokenLosses]


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyLoss:
    """A policy loss and what it declares."""

    declaration: LossDeclaration
    function: PolicyLossFunction


def poison(current: Tensor, read: list[Tensor]) -> Tensor:
    """Return 0 with gradient 0 where all numbers are finite, NaN with gradient NaN elsewhere, [m].

    Clamps and clips turn an infinite log-prob or a NaN into harmless numbers; added to the loss, this keeps a
    non-finite number on the mask from being hidden.
    """
    finite = torch.isfinite(current.detach())
    for values in read:
        finite = finite & torch.isfinite(values)
    return current * torch.where(finite, 0.0, torch.nan).to(current.dtype)
