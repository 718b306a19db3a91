"""Losses that clip a probability ratio.

Shapes: m tokens on the loss mask. r_t = exp(clamp(lp - lp_old, -20, 20)). Where a clip binds, the value is the clipped
one and the gradient is 0.
"""

import torch
from torch import Tensor

from megappo.algo.kl import EXPONENT_LIMIT
from megappo.algo.losses.base import LossInputs, TokenLosses
from megappo.config.algorithm import ClipConfig, PolicyLossConfig


def _clip(ratio: Tensor, advantages: Tensor, clip: ClipConfig) -> tuple[Tensor, Tensor]:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)) and where the clip binds, [m] each."""
    binds = ((advantages > 0) & (ratio > 1 + clip.high)) | ((advantages < 0) & (ratio < 1 - clip.low))
    clipped = ratio.detach().clamp(1 - clip.low, 1 + clip.high)
    return torch.where(binds, -advantages * clipped, -advantages * ratio), binds


def ppo_clip(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Clipped surrogate of PPO, with an optional bound for negative advantages (dual clip).

    Formula: max(-A r, -A clip(r, 1 - low, 1 + high)); with dual c > 1, for A < 0: min(that, -A c).
    Source: Schulman et al. 2017, arXiv:1707.06347; unequal bounds: DAPO, arXiv:2503.14476; dual clip: Ye et al. 2020,
        arXiv:1912.09729.
    Config: clip.low, clip.high, clip.dual.
    Use: the default.
    """
    ratio = inputs.ratio()
    losses, binds = _clip(ratio, inputs.advantages, config.clip)
    dual_binds = None
    if config.clip.dual is not None:
        dual_binds = (inputs.advantages < 0) & (ratio > config.clip.dual)
        losses = torch.where(dual_binds, -inputs.advantages * config.clip.dual, losses)
    return TokenLosses(losses=losses, ratio=ratio.detach(), clipped=binds, dual_clipped=dual_binds)


def gspo(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Clip on the ratio of the whole sequence.

    Formula: s = exp(clamp(mean over loss tokens of lp - lp_old)); max(-A s, -A clip(s, 1 - low, 1 + high)) on every
        token, the gradient of s passed straight to the token: ds/dlp_t = s.
    Source: Zheng et al. 2025, GSPO, arXiv:2507.18071 (GSPO-token, eq. 13).
    Config: clip.low, clip.high (3e-4 and 4e-4 in the paper). Aggregation is sequence_mean_token_mean by definition.
    Use: mixture-of-experts models, whose token ratios are noisy.
    """
    log_ratio = inputs.sequence_mean((inputs.log_probs - inputs.old_log_probs).detach())
    sequence_ratio = log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    ratio = sequence_ratio * (1.0 + (inputs.log_probs - inputs.log_probs.detach()))
    losses, binds = _clip(ratio, inputs.advantages, config.clip)
    return TokenLosses(losses=losses, ratio=sequence_ratio, clipped=binds)


def cispo(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Clipped importance weight on the plain policy gradient: no token loses its gradient.

    Formula: -stopgrad(clip(r, 1 - low, 1 + high)) A lp; low >= 1 means no lower bound.
    Source: MiniMax 2025, CISPO, arXiv:2506.13585.
    Config: clip.low, clip.high.
    Use: rare tokens (for example "wait") that a clip would silence.
    """
    ratio = inputs.ratio().detach()
    lower, upper = 1 - config.clip.low, 1 + config.clip.high
    losses = -ratio.clamp(lower, upper) * inputs.advantages * inputs.log_probs
    # The weight is bounded here but no gradient is cut, so nothing counts as clipped.
    return TokenLosses(losses=losses, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))


def gmpo(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Geometric mean of the token ratios, each clipped in log space.

    Formula: x = lp - lp_old, for A >= 0 min(x, high), for A < 0 max(x, -low); -A exp(mean of x over loss tokens).
    Source: Zhao et al. 2025, GMPO, arXiv:2507.20673.
    Config: clip.low, clip.high (log-ratio units, 0.4 in the paper). Aggregation is sequence_mean_token_mean by
        definition.
    Use: outlier token ratios upset training.
    """
    log_ratio = inputs.log_probs - inputs.old_log_probs
    positive = inputs.advantages >= 0
    binds = (positive & (log_ratio > config.clip.high)) | (~positive & (log_ratio < -config.clip.low))
    bounded = torch.where(positive, log_ratio.clamp(max=config.clip.high), log_ratio.clamp(min=-config.clip.low))
    ratio = inputs.sequence_mean(bounded).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    return TokenLosses(losses=-inputs.advantages * ratio, ratio=ratio.detach(), clipped=binds)
