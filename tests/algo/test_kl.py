"""KL estimators, value and gradient, and the coefficient of KL in reward."""

import math

import numpy as np
import pytest
import torch

from megappo.algo.kl import KL_ESTIMATORS, KLCoefficient, compute_kl, k3_is_capped
from megappo.config.algorithm import KLController, KLInRewardConfig


def value_and_gradient(estimator: str, difference: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    log_prob = torch.tensor([difference], dtype=dtype, requires_grad=True)
    kl = compute_kl(log_prob, estimator)
    kl.sum().backward()
    assert log_prob.grad is not None
    return kl.item(), log_prob.grad.item()


@pytest.mark.parametrize("d", [-2.0, -0.3, 0.0, 0.5, 3.0])
def test_values_and_gradients_follow_the_formulas(d: float) -> None:
    k3, sign = math.exp(-d) - 1 + d, (d > 0) - (d < 0)
    expected = {
        "k1": (d, 1.0),
        "abs": (abs(d), sign),
        "k2": (d * d / 2, d),
        "k3": (k3, 1 - math.exp(-d)),
        "k1+": (d, d),
        "k3+": (k3, d),
    }
    assert expected.keys() == KL_ESTIMATORS.keys()
    for estimator, pair in expected.items():
        assert value_and_gradient(estimator, d) == pytest.approx(pair), estimator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
@pytest.mark.parametrize("d", [-100.0, 100.0])
def test_extreme_differences_have_finite_value_and_gradient_in_every_dtype(
    estimator: str, d: float, dtype: torch.dtype
) -> None:
    value, gradient = value_and_gradient(estimator, d, dtype)
    assert math.isfinite(value) and math.isfinite(gradient)


@pytest.mark.parametrize("d", [-100.0, -2.7, 11.0, 100.0])
def test_k3_is_capped_with_no_gradient_beyond(d: float) -> None:
    assert value_and_gradient("k3", d) == (10.0, 0.0)
    assert k3_is_capped(torch.tensor([d])).item()


def test_k3_equals_the_float64_formula_between_the_caps() -> None:
    d = torch.linspace(-2.0, 5.0, 101)
    exact = torch.expm1(-d.double()) + d.double()
    assert not k3_is_capped(d).any()
    # 2e-6 absolute: a few fp32 roundings of numbers up to 7.
    assert (compute_kl(d, "k3").double() - exact).abs().max() < 2e-6


def test_kl_of_half_precision_inputs_is_computed_in_single_precision() -> None:
    assert compute_kl(torch.zeros(1, dtype=torch.bfloat16), "k3").dtype is torch.float32
    assert compute_kl(torch.zeros(1, dtype=torch.float64), "k3").dtype is torch.float64


def coefficient(**keys: object) -> KLCoefficient:
    return KLCoefficient(KLInRewardConfig(**({"coef": 0.1, "target": 0.1, "horizon": 10000} | keys)))  # type: ignore[arg-type]


def test_the_adaptive_coefficient_moves_by_a_clipped_error_in_proportion_to_the_sequences() -> None:
    adaptive = coefficient(controller=KLController.adaptive)
    adaptive.update([np.full(200, 0.2), np.full(56, 0.2)])
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 256 / 10000))
    adaptive.update([np.array([0.09])])
    assert adaptive.value == pytest.approx(0.100512 * (1 - 0.1 / 10000))


def test_empty_sequences_take_no_part_in_the_adaptive_coefficient() -> None:
    adaptive = coefficient(controller=KLController.adaptive, horizon=10)
    adaptive.update([np.array([0.2, np.nan]), np.array([np.nan])])
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 / 10))
    before = adaptive.value
    adaptive.update([np.array([np.nan])])
    assert adaptive.value == before


def test_a_fixed_coefficient_never_moves() -> None:
    fixed = coefficient()
    fixed.update([np.full(256, 5.0)])
    assert fixed.value == 0.1


def test_the_coefficient_survives_a_checkpoint() -> None:
    saved, restored = coefficient(controller=KLController.adaptive), coefficient(controller=KLController.adaptive)
    saved.update([np.full(256, 5.0)])
    restored.load_state_dict(saved.state_dict())
    assert restored.value == saved.value != 0.1
    fixed = coefficient()
    fixed.load_state_dict({"value": 0.7})
    assert fixed.value == 0.1, "what the configuration says now"
