"""Policy losses on hand-computed tables; metrics; the drift monitor; the entropy bonus; supervised fine-tuning."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megappo.algo.losses import LossOutput, PolicyLossBatch, compute_policy_loss
from megappo.config.algorithm import (
    AlgorithmConfig,
    ClipConfig,
    Divergence,
    EntropyConfig,
    KLConfig,
    KLInLossConfig,
    OldLogProbs,
    PolicyLossConfig,
)
from megappo.observability.metrics import values


def run(
    loss: PolicyLossConfig,
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    mask: Sequence[int] | None = None,
    **more: object,
) -> tuple[LossOutput, list[float]]:
    """Sum the token losses (weight 1 each) of tokens with the given ratios; return them with the gradient."""
    before = torch.tensor(old if old is not None else [-5.0] * len(ratios), dtype=torch.float64)
    log_probs = (before + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    lengths = lengths or [len(ratios)]
    batch = PolicyLossBatch(
        offsets=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        loss_mask=torch.tensor(mask or [1] * len(ratios), dtype=torch.bool),
        loss_weights=torch.ones(len(ratios)),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_log_probs=before,
        **more,  # type: ignore[arg-type]
    )
    output = compute_policy_loss(log_probs, batch, AlgorithmConfig(policy_loss=loss))
    output.loss.backward()
    assert isinstance(log_probs.grad, Tensor)
    return output, log_probs.grad.tolist()


def ppo(**clip: float) -> PolicyLossConfig:
    return PolicyLossConfig(name="ppo_clip", clip=ClipConfig(**clip))


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(-1, 10, 3.0), (-1, 2, 2.0), (-1, 0.5, 0.8), (2, 10, -2.4), (2, 0.5, -1.0), (1, 1.1, -1.1)],
)
def test_the_dual_clip_touches_negative_advantages_only(advantage: float, ratio: float, expected: float) -> None:
    output, _ = run(ppo(low=0.2, high=0.2, dual=3.0), [ratio], [advantage])
    assert output.loss.item() == pytest.approx(expected)


def test_the_dual_clip_is_off_unless_set() -> None:
    output, gradient = run(ppo(), [10], [-1])
    assert output.loss.item() == pytest.approx(10) and gradient == pytest.approx([10])
    assert "actor/dual_clip_fraction" not in values(output.metrics)


def test_upper_and_lower_clip_are_independent() -> None:
    output, _ = run(ppo(low=0.1, high=0.5), [1.4, 1.6, 0.95, 0.5], [1, 1, -1, -1])
    assert output.loss.item() == pytest.approx(-1.4 - 1.5 + 0.95 + 0.9)


def test_the_clip_fraction_counts_only_where_the_clip_binds() -> None:
    output, gradient = run(ppo(), [1.5, 0.5, 1.5, 0.5], [-1, 1, 1, -1])
    assert values(output.metrics)["actor/clip_fraction"] == 0.5
    assert [number == 0 for number in gradient] == [False, False, True, True]


def test_the_dual_clip_fraction_counts_where_it_binds() -> None:
    output, gradient = run(ppo(dual=3.0), [10, 2, 10], [-1, -1, 1])
    assert values(output.metrics)["actor/dual_clip_fraction"] == pytest.approx(1 / 3)
    assert gradient[0] == 0 != gradient[1]


def test_ratio_metrics_and_kl_of_the_update() -> None:
    output, _ = run(ppo(), [0.5, 2.0, 9.0], [1, 1, 1], mask=[1, 1, 0])
    found = values(output.metrics)
    assert found["actor/ratio/mean"] == pytest.approx(1.25)
    assert (found["actor/ratio/min"], found["actor/ratio/max"]) == pytest.approx((0.5, 2.0))
    assert found["actor/approx_kl"] == pytest.approx(((0.5 - 1 - math.log(0.5)) + (2 - 1 - math.log(2))) / 2)


def test_the_ratio_is_bounded_before_exp() -> None:
    output, gradient = run(ppo(), [math.exp(30), math.exp(-30)], [-1, 1])
    assert output.loss.item() == pytest.approx(math.exp(20) - math.exp(-20))
    assert gradient == [0, 0]


def test_gspo_clips_the_sequence_ratio_and_ignores_masked_tokens() -> None:
    log_ratios = [0.2, -0.1, 0.5]
    for masked in (9.0, -9.0):
        ratios = [*(math.exp(x) for x in log_ratios), math.exp(masked)]
        config = PolicyLossConfig(name="gspo", clip=ClipConfig(low=0.5, high=0.5))
        output, gradient = run(config, ratios, [1, 1, 1, 1], mask=[1, 1, 1, 0])
        s = math.exp(0.2)
        assert output.loss.item() == pytest.approx(-3 * s)
        assert gradient == pytest.approx([-s, -s, -s, 0])
        assert values(output.metrics)["actor/ratio/max"] == pytest.approx(1.2214, abs=1e-4)


def test_gspo_cuts_the_gradient_of_a_whole_sequence_at_once() -> None:
    config = PolicyLossConfig(name="gspo", clip=ClipConfig(low=0.1, high=0.1))
    # Ratios of the sequences: 1.2 and 1.0, though token ratios of the second are far out.
    output, gradient = run(config, [1.2, 1.2, 2.0, 0.5], [1, 1, 1, 1], lengths=[2, 2])
    assert output.loss.item() == pytest.approx(-2 * 1.1 - 2 * 1.0)
    assert gradient == pytest.approx([0, 0, -1, -1])
    assert values(output.metrics)["actor/clip_fraction"] == 0.5


def test_cispo_bounds_the_weight_but_keeps_every_gradient() -> None:
    config = PolicyLossConfig(name="cispo", clip=ClipConfig(low=0.2, high=0.3))
    output, gradient = run(config, [2.0, 0.5, 1.1], [1, 1, -2], old=[-1, -1, -1])
    assert gradient == pytest.approx([-1.3, -0.8, 2.2])
    lp = [-1 + math.log(2), -1 + math.log(0.5), -1 + math.log(1.1)]
    assert output.loss.item() == pytest.approx(-1.3 * lp[0] - 0.8 * lp[1] + 2.2 * lp[2])


def test_cispo_with_low_of_one_has_no_lower_bound() -> None:
    _, gradient = run(PolicyLossConfig(name="cispo", clip=ClipConfig(low=1.0, high=4.0)), [0.01], [1])
    assert gradient == pytest.approx([-0.01])


def test_sapo_has_the_gradient_of_plain_policy_gradient_at_ratio_one() -> None:
    output, gradient = run(PolicyLossConfig(name="sapo"), [1.0, 1.0], [2, -3])
    assert gradient == pytest.approx([-2, 3])
    assert output.loss.item() == pytest.approx(-2 * 2 / 1.0 + 3 * 2 / 1.05)


def test_sapo_closes_faster_for_negative_advantages() -> None:
    _, gradient = run(PolicyLossConfig(name="sapo", tau_positive=1.0, tau_negative=2.0), [3.0, 3.0], [1, -1])
    assert abs(gradient[1]) < abs(gradient[0])


def test_gmpo_clips_each_token_in_log_space_and_takes_the_geometric_mean() -> None:
    config = PolicyLossConfig(name="gmpo", clip=ClipConfig(low=0.4, high=0.4))
    output, gradient = run(config, [math.exp(1.0), math.exp(-0.2)], [1, 1])
    ratio = math.exp((0.4 - 0.2) / 2)
    assert output.loss.item() == pytest.approx(-2 * ratio)
    # The loss of either token depends on both log-probs; the first is clipped.
    assert gradient == pytest.approx([0, -ratio])
    output, _ = run(config, [math.exp(1.0), math.exp(-1.0)], [-1, -1])
    assert output.loss.item() == pytest.approx(2 * math.exp((1.0 - 0.4) / 2))


def test_gpg_with_advantage_one_is_the_cross_entropy_of_supervised_training() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([3, 0, 10, 2, 2, 7])
    mask = torch.tensor([False, True, True, True, False, True])
    log_probs = logits.log_softmax(-1)[torch.arange(6), targets]
    batch = PolicyLossBatch(
        offsets=torch.tensor([0, 4, 6]), loss_mask=mask, loss_weights=torch.full((6,), 0.25), advantages=torch.ones(6)
    )
    output = compute_policy_loss(log_probs, batch, AlgorithmConfig(policy_loss=PolicyLossConfig(name="gpg")))
    (gradient,) = torch.autograd.grad(output.loss, logits, retain_graph=True)
    reference = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    (expected,) = torch.autograd.grad(reference, logits)
    assert output.loss.item() == pytest.approx(reference.item(), abs=1e-6)
    assert (gradient - expected).abs().max() < 1e-7


@pytest.mark.parametrize(("divergence", "delta"), [(Divergence.total_variation, 0.15), (Divergence.binary_kl, 0.05)])
def test_dppo_bounds_each_divergence_in_its_own_units(divergence: Divergence, delta: float) -> None:
    # Moves of 0.14 and 0.16 in probability from 0.5: 0.040 and 0.054 of the binary KL.
    ratios, old = [1.28, 1.32], [math.log(0.5)] * 2
    by_default, _ = run(PolicyLossConfig(name="dppo", divergence=divergence), ratios, [1, 1], old=old)
    given, _ = run(PolicyLossConfig(name="dppo", divergence=divergence, delta=delta), ratios, [1, 1], old=old)
    assert values(by_default.metrics)["actor/clip_fraction"] == values(given.metrics)["actor/clip_fraction"] == 0.5


@pytest.mark.parametrize(("divergence", "delta"), [(Divergence.total_variation, 0.1), (Divergence.binary_kl, 0.03)])
def test_dppo_cuts_only_gradients_away_from_the_old_policy_beyond_the_bound(
    divergence: Divergence, delta: float
) -> None:
    # Probability .5 -> .75, .5 -> .55 (small), .5 -> .25, .5 -> .75 back with A < 0, rare token .001 -> .01 (small).
    old = [math.log(0.5)] * 4 + [math.log(0.001)]
    config = PolicyLossConfig(name="dppo", divergence=divergence, delta=delta)
    ratios, advantages = [1.5, 1.1, 0.5, 1.5, 10], [1, 1, -1, -1, 1]
    output, gradient = run(config, ratios, advantages, old=old)
    assert output.loss.item() == pytest.approx(sum(-a * r for a, r in zip(advantages, ratios)))
    assert gradient == pytest.approx([0, -1.1, 0, 1.5, -10])
    assert values(output.metrics)["actor/clip_fraction"] == pytest.approx(0.4)


def test_dppo_binary_kl_is_finite_for_a_certain_token() -> None:
    config = PolicyLossConfig(name="dppo", divergence=Divergence.binary_kl, delta=0.1)
    output, gradient = run(config, [1.0, 2.0], [1, 1], old=[0.0, math.log(0.5)])
    assert math.isfinite(output.loss.item()) and gradient == pytest.approx([-1, 0])


def test_clip_cov_cuts_the_gradient_of_selected_tokens() -> None:
    selected = torch.tensor([True, False])
    output, gradient = run(PolicyLossConfig(name="clip_cov"), [1.1, 1.1], [1, 1], selected=selected)
    assert output.loss.item() == pytest.approx(-2.2) and gradient == pytest.approx([0, -1.1])


def test_kl_cov_penalises_selected_tokens() -> None:
    config = PolicyLossConfig(name="kl_cov", selected_kl_coef=0.5)
    output, gradient = run(config, [2.0, 2.0], [1, 1], selected=torch.tensor([True, False]))
    assert output.loss.item() == pytest.approx(-4 + 0.5 * math.log(2))
    assert gradient == pytest.approx([-2 + 0.5, -2])


def test_correction_weights_multiply_token_losses_of_sequence_level_losses_too() -> None:
    weights = torch.tensor([1.0, 2.0, 1.0])
    for name in ("ppo_clip", "gspo", "gmpo"):
        output, gradient = run(PolicyLossConfig(name=name), [1, 1, 1], [1, 1, 1], correction_weights=weights)
        assert output.loss.item() == pytest.approx(-4), name
        assert sum(gradient) == pytest.approx(-4), name


def test_without_old_log_probs_the_current_ones_stand_for_them() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = PolicyLossBatch(
        offsets=torch.tensor([0, 2]),
        loss_mask=torch.ones(2, dtype=torch.bool),
        loss_weights=torch.ones(2),
        advantages=torch.tensor([3.0, -1.0]),
        rollout_log_probs=torch.tensor([-1.25, np.nan]),
    )
    output = compute_policy_loss(log_probs, batch, AlgorithmConfig())
    output.loss.backward()
    assert output.loss.item() == -2 and log_probs.grad is not None and log_probs.grad.tolist() == [-3, 1]
    found = values(output.metrics)
    assert found["actor/clip_fraction"] == 0 and found["actor/ratio/max"] == 1
    assert found["actor/rollout_log_prob_diff/max"] == 0.25, "a token that the engine did not report is left out"
    assert found["actor/rollout_log_prob_diff/mean"] == 0.25


@pytest.mark.parametrize(("first", "measured"), [(True, True), (False, False)])
def test_the_first_step_measures_the_engine_where_its_log_probs_stand_for_the_old_ones(
    first: bool, measured: bool
) -> None:
    old = torch.tensor([-1.25, -2.5])
    batch = PolicyLossBatch(
        offsets=torch.tensor([0, 2]),
        loss_mask=torch.ones(2, dtype=torch.bool),
        loss_weights=torch.ones(2),
        advantages=torch.ones(2),
        old_log_probs=old,
        rollout_log_probs=old,
        is_first_step=first,
    )
    log_probs = torch.tensor([-1.0, -2.0])
    rollout = AlgorithmConfig(old_log_probs=OldLogProbs.rollout)
    found = values(compute_policy_loss(log_probs, batch, rollout).metrics)
    assert ("actor/rollout_log_prob_diff/mean" in found) is measured
    if measured:
        assert found["actor/rollout_log_prob_diff/mean"] == 0.375
        assert found["actor/rollout_log_prob_diff/max"] == 0.5
    recomputed = values(compute_policy_loss(log_probs, batch, AlgorithmConfig()).metrics)
    assert "actor/rollout_log_prob_diff/mean" not in recomputed, "the pass before the update has measured it"


def test_the_first_step_reports_how_far_log_probs_drifted_without_an_update() -> None:
    drifted, _ = run(ppo(), [1.1, 0.9], [1, 1], is_first_step=True)
    assert values(drifted.metrics)["actor/first_step_log_ratio/max"] == pytest.approx(-math.log(0.9))
    later, _ = run(ppo(), [1.1, 0.9], [1, 1])
    assert "actor/first_step_log_ratio/max" not in later.metrics


def entropy_of(logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def test_a_positive_entropy_coefficient_raises_entropy() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
    batch = PolicyLossBatch(
        offsets=torch.tensor([0, 1]),
        loss_mask=torch.tensor([True]),
        loss_weights=torch.ones(1),
        advantages=torch.zeros(1),
        entropy=entropy_of(logits),
    )
    algorithm = AlgorithmConfig(entropy=EntropyConfig(coef=0.01))
    output = compute_policy_loss(logits.log_softmax(-1)[:, 0], batch, algorithm)
    assert output.loss.item() == pytest.approx(-0.01 * entropy_of(logits).item())
    (gradient,) = torch.autograd.grad(output.loss, logits)
    assert entropy_of(logits - gradient).item() > entropy_of(logits).item()


def test_the_entropy_metric_is_a_mean_over_loss_tokens() -> None:
    entropy = torch.tensor([math.log(8)] * 2 + [-1e6])
    output, _ = run(ppo(), [1, 1, 1], [0, 0, 0], mask=[1, 1, 0], entropy=entropy)
    assert values(output.metrics)["actor/entropy/mean"] == pytest.approx(2.0794, abs=1e-4)
    assert "actor/entropy_loss" not in output.metrics, "no term with coefficient 0"


def test_kl_in_loss_is_added_with_its_coefficient_and_absent_when_off() -> None:
    reference = torch.tensor([-5.0 - 0.5])
    log_probs = torch.tensor([-5.0], requires_grad=True)
    batch = PolicyLossBatch(
        offsets=torch.tensor([0, 1]),
        loss_mask=torch.tensor([True]),
        loss_weights=torch.ones(1),
        advantages=torch.zeros(1),
        ref_log_probs=reference,
    )
    on = AlgorithmConfig(kl=KLConfig(in_loss=KLInLossConfig(estimator="k2", coef=0.2)))
    output = compute_policy_loss(log_probs, batch, on)
    assert output.loss.item() == pytest.approx(0.2 * 0.125)
    assert values(output.metrics)["actor/kl/mean"] == pytest.approx(0.125)
    off = compute_policy_loss(log_probs, batch, AlgorithmConfig())
    assert off.loss.item() == 0 and "actor/kl/mean" not in off.metrics


def test_a_loss_from_outside_is_a_plain_function() -> None:
    output, _ = run(PolicyLossConfig(name="tests.algo.plugins:squared_log_probs"), [1, 1], [0, 0], old=[-2, -3])
    assert output.loss.item() == 13
