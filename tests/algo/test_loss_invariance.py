"""Every allowed loss and aggregation: equal to brute force, and the same loss and gradient for any order and split of
the mini-batch into micro-batches, whatever lies off the mask."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algo.losses import POLICY_LOSSES
from megappo.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    ClipConfig,
    Divergence,
    EntropyConfig,
    KLConfig,
    KLInLossConfig,
    PolicyLossConfig,
)
from megappo.config.algorithm_declarations import LOSS_DECLARATIONS
from megappo.config.algorithm_rules import KL_ESTIMATORS
from megappo.observability.metrics import merge, values
from tests.algo.loss_batches import TOKEN_FIELDS, brute_force, make_case, run_loss, weights_of

LENGTHS = [3, 0, 7, 1, 5, 12, 2, 4]


def variants() -> list[tuple[str, AlgorithmConfig]]:
    """Every loss with every aggregation that it allows, entropy bonus and KL in loss switched on."""
    found: list[tuple[str, AlgorithmConfig]] = []
    for name, declared in LOSS_DECLARATIONS.items():
        modes = [declared.aggregation] if declared.fixed_aggregation else list(Aggregation)
        for mode in modes:
            loss = PolicyLossConfig(name=name, aggregation=mode)
            if mode is Aggregation.token_sum_constant:
                loss.constant_length = 20.0
            if name == "ppo_clip":
                loss.clip = ClipConfig(low=0.2, high=0.28, dual=1.5)
            algorithm = AlgorithmConfig(
                policy_loss=loss,
                entropy=EntropyConfig(coef=0.01),
                kl=KLConfig(in_loss=KLInLossConfig(estimator="k3", coef=0.1)),
            )
            found.append((f"{name}-{mode.value}", algorithm))
    dppo = PolicyLossConfig(name="dppo", divergence=Divergence.binary_kl, delta=0.02)
    kl_forms = [
        (f"kl-{estimator}", AlgorithmConfig(kl=KLConfig(in_loss=KLInLossConfig(estimator=estimator, coef=0.5))))
        for estimator in ("abs", "k2", "k1+", "k3+")
    ]
    return [*found, ("dppo-binary_kl", AlgorithmConfig(policy_loss=dppo)), *kl_forms]


VARIANTS = variants()
parametrize_losses = pytest.mark.parametrize(
    "algorithm", [algorithm for _, algorithm in VARIANTS], ids=[name for name, _ in VARIANTS]
)


def test_every_registered_loss_and_kl_form_is_covered() -> None:
    assert set(POLICY_LOSSES.names()) == set(LOSS_DECLARATIONS)
    # k1 is refused as a loss.
    assert {algorithm.kl.in_loss.estimator for _, algorithm in VARIANTS} | {"k1"} == set(KL_ESTIMATORS)


@parametrize_losses
@pytest.mark.parametrize("uniform", [True, False])
def test_loss_and_gradient_equal_brute_force(algorithm: AlgorithmConfig, uniform: bool) -> None:
    case = make_case(7, LENGTHS, uniform=uniform)
    output, gradient = run_loss(case, algorithm)
    loss, expected = brute_force(case, algorithm)
    # float64 on both sides: rounding only.
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


@parametrize_losses
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_order_and_micro_batches_change_nothing(algorithm: AlgorithmConfig, seed: int, data: st.DataObject) -> None:
    case = make_case(seed, LENGTHS)
    order = data.draw(st.permutations(range(len(LENGTHS))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(LENGTHS)), max_size=4)))
    parts = [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(LENGTHS)])]
    weights = weights_of(case, algorithm)
    whole, gradient = run_loss(case, algorithm, dtype=torch.float32, weights=weights)
    found = [run_loss(case, algorithm, rows=part, dtype=torch.float32, weights=weights) for part in parts]
    # fp32 sums in another order.
    assert sum(output.loss.item() for output, _ in found) == pytest.approx(whole.loss.item(), abs=1e-6)
    joined = np.concatenate([part_gradient for _, part_gradient in found])
    index = np.concatenate([np.arange(case.offsets[row], case.offsets[row + 1]) for row in order])
    np.testing.assert_allclose(joined, gradient[index], atol=1e-6)
    merged = values(merge(output.metrics for output, _ in found))
    assert merged == pytest.approx(values(whole.metrics), abs=1e-5)


@parametrize_losses
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e6])
def test_nothing_off_the_mask_is_read(algorithm: AlgorithmConfig, garbage: float) -> None:
    case = make_case(3, LENGTHS)
    clean, clean_gradient = run_loss(case, algorithm, dtype=torch.float32)
    for name in TOKEN_FIELDS:
        getattr(case, name)[~case.loss_mask] = garbage
    dirty, dirty_gradient = run_loss(case, algorithm, dtype=torch.float32)
    assert clean.loss.item() == dirty.loss.item()
    assert clean.metrics == dirty.metrics
    assert clean_gradient.tobytes() == dirty_gradient.tobytes()
    assert (dirty_gradient[~case.loss_mask] == 0).all()


@parametrize_losses
@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "ref_log_probs", "advantages", "correction_weights"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_number_on_the_mask_that_is_not_finite_is_not_hidden(
    algorithm: AlgorithmConfig, field: str, bad: float
) -> None:
    if field == "ref_log_probs":
        algorithm = dataclasses.replace(algorithm, kl=KLConfig(in_loss=KLInLossConfig(estimator="k3", coef=0.1)))
    case = make_case(3, LENGTHS)
    getattr(case, field)[case.loss_mask.argmax()] = bad
    output, gradient = run_loss(case, algorithm)
    assert not np.isfinite(output.loss.item())
    assert not np.isfinite(gradient).all()


@parametrize_losses
def test_a_micro_batch_without_loss_tokens_adds_nothing_and_has_no_metrics(algorithm: AlgorithmConfig) -> None:
    case = make_case(3, [4, 2])
    case.loss_mask[:] = False
    output, gradient = run_loss(case, algorithm)
    assert output.loss.item() == 0 and (gradient == 0).all()
    assert values(output.metrics) == {}


@parametrize_losses
def test_half_precision_log_probs_are_computed_in_single_precision(algorithm: AlgorithmConfig) -> None:
    case = make_case(3, LENGTHS)
    for name in TOKEN_FIELDS:
        setattr(case, name, torch.tensor(getattr(case, name)).bfloat16().double().numpy())
    weights = torch.tensor(weights_of(case, algorithm)).bfloat16().double().numpy()
    half, _ = run_loss(case, algorithm, dtype=torch.bfloat16, weights=weights)
    single, _ = run_loss(case, algorithm, dtype=torch.float32, weights=weights)
    assert half.loss.dtype is torch.float32
    assert half.loss.item() == pytest.approx(single.loss.item(), abs=1e-6)


@parametrize_losses
def test_advantages_scale_the_policy_loss(algorithm: AlgorithmConfig) -> None:
    # The penalty of kl_cov does not scale with advantages.
    loss = dataclasses.replace(algorithm.policy_loss, selected_kl_coef=0.0)
    plain = dataclasses.replace(algorithm, policy_loss=loss, entropy=EntropyConfig(), kl=KLConfig())
    case = make_case(5, LENGTHS)
    once, gradient = run_loss(case, plain)
    case.advantages *= 1e3
    scaled, scaled_gradient = run_loss(case, plain)
    assert scaled.loss.item() == pytest.approx(1e3 * once.loss.item(), rel=1e-9)
    np.testing.assert_allclose(scaled_gradient, 1e3 * gradient, rtol=1e-9)
