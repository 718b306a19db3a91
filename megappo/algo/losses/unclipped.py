"""Losses without a hard clip, and the two that treat a few tokens of high covariance apart.

Shapes: m tokens on the loss mask. r_t = exp(clamp(lp - lp_old, -20, 20)).
"""

import torch
from torch import Tensor

from megappo.algo.losses.base import LossInputs, TokenLosses
from megappo.algo.losses.clipped import ppo_clip
from megappo.config.algorithm import Divergence, PolicyLossConfig


def gpg(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Plain policy gradient.

    Formula: -A lp.
    Source: Chu et al. 2025, GPG, arXiv:2504.02546; Williams 1992, REINFORCE.
    Config: none.
    Use: exactly one optimizer step per batch. With A = 1 it is the cross-entropy of supervised fine-tuning.
    """
    return TokenLosses(losses=-inputs.advantages * inputs.log_probs)


def sapo(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """A smooth gate in place of the clip.

    Formula: -A sigmoid(tau (r - 1)) 4 / tau, tau = tau_positive for A > 0, else tau_negative.
    Source: Gao et al. 2025, SAPO, arXiv:2511.20347.
    Config: tau_positive, tau_negative. Aggregation is sequence_mean_token_mean by definition.
    Use: off-policy steps without the on/off behaviour of a clip.
    """
    ratio = inputs.ratio()
    positive = torch.full_like(ratio, config.tau_positive)
    tau = torch.where(inputs.advantages > 0, positive, config.tau_negative)
    losses = -inputs.advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return TokenLosses(losses=losses, ratio=ratio.detach())


DPPO_DELTAS = {Divergence.total_variation: 0.15, Divergence.binary_kl: 0.05}
"""The bounds of the paper's experiments, each in units of its divergence."""


def dppo(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Trust region on a divergence of the token's distribution in place of its ratio.

    Formula: -A r; the gradient is cut where (A > 0 and r > 1) or (A < 0 and r < 1), and D > delta.
        D = |pi - pi_old| (total_variation) or pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
        (binary_kl), pi the probability of the sampled token.
    Source: Qi et al. 2026, DPPO, arXiv:2602.04879.
    Config: divergence, delta (null: 0.15 of total_variation, 0.05 of binary_kl). `old_log_probs: rollout` anchors the
        region at the policy that sampled, as in the paper.
    Use: large vocabularies, where a ratio clip binds on rare tokens and misses frequent ones.
    """
    ratio = inputs.ratio()
    away = ((inputs.advantages > 0) & (ratio > 1)) | ((inputs.advantages < 0) & (ratio < 1))
    current = inputs.log_probs.detach()
    if config.divergence is Divergence.total_variation:
        divergence = (current.exp() - inputs.old_log_probs.exp()).abs()
    else:
        divergence = _binary_kl(inputs.old_log_probs, current)
    cut = away & (divergence > (DPPO_DELTAS[config.divergence] if config.delta is None else config.delta))
    losses = -inputs.advantages * ratio
    return TokenLosses(losses=torch.where(cut, losses.detach(), losses), ratio=ratio.detach(), clipped=cut)


def _binary_kl(old: Tensor, current: Tensor) -> Tensor:
    """KL between the Bernoulli distributions "the sampled token or another", from log-probs [m]."""
    tiny = torch.finfo(old.dtype).tiny
    other_old, other = (-torch.expm1(old)).clamp(min=tiny), (-torch.expm1(current)).clamp(min=tiny)
    return old.exp() * (old - current) + other_old * (other_old.log() - other.log())


def clip_cov(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """ppo_clip without the gradient of a few random tokens of high covariance, which drive the entropy down.

    Formula: as ppo_clip with the gradient cut on selected tokens: selected_fraction of the loss tokens, drawn once per
        update among those whose covariance (lp_old - mean)(A - mean) is in [covariance_low, covariance_high].
    Source: Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617.
    Config: clip.low, clip.high, selected_fraction, covariance_low, covariance_high, and algorithm.seed.
    Use: entropy collapses early.
    """
    assert inputs.selected is not None
    base = ppo_clip(inputs, config)
    assert base.clipped is not None
    losses = torch.where(inputs.selected, base.losses.detach(), base.losses)
    return TokenLosses(losses=losses, ratio=base.ratio, clipped=base.clipped | inputs.selected)


def kl_cov(inputs: LossInputs, config: PolicyLossConfig) -> TokenLosses:
    """Unclipped surrogate with a penalty on the tokens of highest covariance.

    Formula: -A r, plus selected_kl_coef |lp - lp_old| on selected tokens: the selected_fraction of the loss tokens
        with the highest covariance (lp_old - mean)(A - mean), chosen once per update.
    Source: Cui et al. 2025, The Entropy Mechanism, arXiv:2505.22617.
    Config: selected_fraction (2e-3 for the 7B, 2e-4 for the 32B model of the paper), selected_kl_coef (1 there).
    Use: entropy collapses early; softer than clip_cov.
    """
    assert inputs.selected is not None
    ratio = inputs.ratio()
    penalty = config.selected_kl_coef * (inputs.log_probs - inputs.old_log_probs).abs()
    losses = -inputs.advantages * ratio + torch.where(inputs.selected, penalty, 0.0)
    return TokenLosses(losses=losses, ratio=ratio.detach())
