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
    Source: Schulman 2020, Approximating KL divergence (http://joschu.net/blog/kl-approx.html).
    Config: kl.in_reward.estimator=k1. As a loss its expected gradient is 0, so it is refused there.
    Use: in the reward.
    """
    return difference


def absolute(difference: Tensor) -> Tensor:
    """|d|.

    Formula: |d|, d = lp - lp_ref.
    Source: Ziegler et al. 2019 describe the penalty, arXiv:1909.08593; the absolute value is common practice.
    Config: kl.in_reward.estimator=abs, kl.in_loss.estimator=abs.
    Use: penalises moves in both directions alike.
    """
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance; its gradient is an unbiased estimate of the gradient of the KL.

    Formula: d^2 / 2, d = lp - lp_ref.
    Source: Schulman 2020, Approximating KL divergence (http://joschu.net/blog/kl-approx.html).
    Config: kl.in_reward.estimator=k2, kl.in_loss.estimator=k2.
    Use: as a loss.
    """
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative.

    Formula: exp(-d) - 1 + d, d = lp - lp_ref clamped to +-20 before exp, the result capped at 10 with gradient 0
        beyond the cap (`kl/capped_fraction` counts in the loss, `kl/in_reward/capped_fraction` in the reward).
    Source: Schulman 2020, Approximating KL divergence (http://joschu.net/blog/kl-approx.html).
    Config: kl.in_reward.estimator=k3, kl.in_loss.estimator=k3.
    Use: the usual choice in the loss.
    """
    return _k3_uncapped(difference).clamp(max=K3_LIMIT)


def _k3_uncapped(difference: Tensor) -> Tensor:
    clamped = difference.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return torch.expm1(-clamped) + clamped


def k3_is_capped(difference: Tensor) -> Tensor:
    """Return where k3 is at its cap, [M] bool."""
    return _k3_uncapped(widen(difference)) > K3_LIMIT


def k1_plus(difference: Tensor) -> Tensor:
    """Value of k1, gradient of k2: what is reported is unbiased, what is followed is the gradient of the KL.

    Formula: d + d^2 / 2 - stopgrad(d^2 / 2), d detached in the first term.
    Source: Tang and Munos 2025, On a few pitfalls in KL divergence gradient estimation for RL, arXiv:2506.09477.
    Config: kl.in_loss.estimator=k1+ (in the reward the same as k1).
    Use: as a loss.
    """
    return _with_k2_gradient(k1(difference), difference)


def k3_plus(difference: Tensor) -> Tensor:
    """Value of k3, gradient of k2.

    Formula: as k3, with d in place of its gradient 1 - exp(-d).
    Source: Tang and Munos 2025, On a few pitfalls in KL divergence gradient estimation for RL, arXiv:2506.09477.
    Config: kl.in_loss.estimator=k3+ (in the reward the same as k3).
    Use: as a loss, when the policy may move far from the reference: the gradient does not vanish at the cap.
    """
    return _with_k2_gradient(k3(difference), difference)


def _with_k2_gradient(value: Tensor, difference: Tensor) -> Tensor:
    gradient = k2(difference)
    return value.detach() + (gradient - gradient.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": k1_plus,
    "k3+": k3_plus,
}


def compute_kl(difference: Tensor, estimator: str) -> Tensor:
    """Return the KL estimate per token [M], in at least fp32; `k1+` and `k3+` have the gradient of k2."""
    return KL_ESTIMATORS[estimator](widen(difference))


class KLCoefficient:
    """Coefficient of KL in reward, fixed or adaptive.

    Formula: token reward R_t -= coef kl_t with d = lp_old - lp_ref. adaptive: after each step
        coef *= 1 + clip(kl / target - 1, -0.2, 0.2) sequences / horizon, kl = mean over non-empty sequences of their
        token mean.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    Config: kl.in_reward.coef, .controller, .target, .horizon. adaptive cannot start from 0.
    Use: adaptive to hold the policy at a given distance from the reference.
    """

    def __init__(self, config: KLInRewardConfig) -> None:
        self._config = config
        self.value = config.coef
        """The coefficient of the next step."""

    def update(self, kl: Sequence[np.ndarray]) -> None:
        """Move the coefficient after a step (see the class).

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
        """Go on from `state_dict`; a fixed coefficient is what the configuration says now."""
        if self._config.controller is KLController.adaptive:
            self.value = state["value"]
