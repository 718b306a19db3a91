"""Estimators of the KL divergence KL(policy || reference) at one sampled token, and the coefficient of KL in reward.

Shapes: M tokens. d = policy log-prob - reference log-prob. Source: Schulman 2020, Approximating KL divergence
(http://joschu.net/blog/kl-approx.html).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megappo.config.algorithm import KLController, KLInRewardConfig

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to +- this before exp: exp(20) is finite in every dtype computed in (fp32, fp64)."""
K3_LIMIT = 10.0
"""Largest value of k3; beyond it the gradient is 0."""


def widen(values: Tensor) -> Tensor:
    """Return the values in at least fp32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def k1(difference: Tensor) -> Tensor:
    """d: unbiased, may be negative.

    Formula: d = lp - lp_ref.
    Use: in the reward. As a loss its expected gradient is 0, so it is refused there.
    """
    return difference


def absolute(difference: Tensor) -> Tensor:
    """|d|.

    Formula: |lp - lp_ref|.
    Use: penalises moves in both directions alike.
    """
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance; its gradient is an unbiased estimate of the gradient of the KL.

    Formula: (lp - lp_ref)^2 / 2.
    Use: as a loss.
    """
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative.

    Formula: exp(-d) - 1 + d, d clamped to +-20 before exp, the result capped at 10 with gradient 0 beyond the cap
        (`kl/capped_fraction` counts).
    Use: the usual choice in the loss.
    """
    return _k3_uncapped(difference).clamp(max=K3_LIMIT)


def _k3_uncapped(difference: Tensor) -> Tensor:
    clamped = difference.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return torch.expm1(-clamped) + clamped


def k3_is_capped(difference: Tensor) -> Tensor:
    """Return where k3 is at its cap, [M] bool."""
    return _k3_uncapped(widen(difference)) > K3_LIMIT


def _with_k2_gradient(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def estimator(difference: Tensor) -> Tensor:
        gradient = k2(difference)
        return value(difference).detach() + (gradient - gradient.detach())

    return estimator


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": _with_k2_gradient(k1),
    "k3+": _with_k2_gradient(k3),
}


def compute_kl(difference: Tensor, estimator: str) -> Tensor:
    """Return the KL estimate per token [M], in at least fp32; `k1+` and `k3+` have the gradient of k2."""
    return _ESTIMATORS[estimator](widen(difference))


class KLCoefficient:
    """Coefficient of KL in reward: fixed, or adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""

    def __init__(self, config: KLInRewardConfig) -> None:
        self._config = config
        self.value = config.coef
        """The coefficient of the next step."""

    def update(self, kl: Sequence[np.ndarray]) -> None:
        """Move the coefficient after a step: value *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.

        Args:
            kl: per shard, [B] float64 masked mean of the KL per sequence, NaN for an empty sequence. The step's KL is
                the mean over non-empty sequences; a step without any leaves the coefficient as it is.
        """
        if self._config.controller is KLController.fixed:
            return
        measured = np.concatenate([np.zeros(0), *kl])
        measured = measured[np.isfinite(measured)]
        if measured.size:
            error = float(np.clip(measured.mean() / self._config.target - 1.0, -0.2, 0.2))
            self.value *= 1.0 + error * measured.size / self._config.horizon

    def state_dict(self) -> dict[str, float]:
        """State for the checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict`."""
        self.value = state["value"]
