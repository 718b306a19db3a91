"""The value loss on hand-computed tables."""

import math

import numpy as np
import pytest
import torch

from megappo.algo.losses import LossOutput, ValueLossBatch, compute_value_loss
from megappo.config.algorithm import AlgorithmConfig, ValueLossConfig
from megappo.observability.metrics import merge, values


def run(
    new: list[float], old: list[float], returns: list[float], *, clip: float | None, mask: list[int] | None = None
) -> tuple[LossOutput, list[float]]:
    current = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    batch = ValueLossBatch(
        old_values=torch.tensor(old, dtype=torch.float64),
        returns=torch.tensor(returns, dtype=torch.float64),
        loss_mask=torch.tensor(mask or [1] * len(new), dtype=torch.bool),
        loss_weights=torch.ones(len(new)),
    )
    output = compute_value_loss(current, batch, AlgorithmConfig(value_loss=ValueLossConfig(clip=clip)))
    output.loss.backward()
    assert current.grad is not None
    return output, current.grad.tolist()


def test_the_larger_of_clipped_and_plain_error_counts() -> None:
    # moved up to .5 (bound .2): plain error (.5-1)^2 = .25 < clipped (.2-1)^2 = .64: clipped, no gradient.
    # moved down to -.9: plain (-.9-1)^2 = 3.61 > clipped (-.2-1)^2: plain.
    output, gradient = run([0.5, -0.9, 0.1], [0, 0, 0], [1, 1, 1], clip=0.2)
    assert output.loss.item() == pytest.approx(0.5 * (0.64 + 3.61 + 0.81))
    assert gradient == pytest.approx([0, -1.9, -0.9])


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    output, gradient = run([5.0], [0.0], [1.0], clip=None)
    assert output.loss.item() == 8 and gradient == [4]
    assert "critic/value_clip_fraction" not in output.metrics


def test_the_clip_fraction_is_measured_on_the_unclipped_move_over_loss_tokens() -> None:
    new, zeros = [0.5, 0.1, -0.9, 0.0], [0.0] * 4
    output, _ = run(new, zeros, zeros, clip=0.2)
    assert values(output.metrics)["critic/value_clip_fraction"] == 0.5
    output, _ = run(new, zeros, zeros, clip=0.2, mask=[1, 1, 1, 0])
    assert values(output.metrics)["critic/value_clip_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e6])
def test_nothing_off_the_mask_is_read(garbage: float) -> None:
    clean, clean_gradient = run([0.5, 0.0], [0, 0], [1, 0], clip=0.2, mask=[1, 0])
    dirty, dirty_gradient = run([0.5, garbage], [0, garbage], [1, garbage], clip=0.2, mask=[1, 0])
    assert clean.loss.item() == dirty.loss.item() and clean.metrics == dirty.metrics
    assert clean_gradient == dirty_gradient and dirty_gradient[1] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_on_the_mask_that_is_not_finite_is_not_hidden(bad: float, place: int) -> None:
    numbers = [[0.5], [0.0], [1.0]]
    numbers[place] = [bad]
    output, gradient = run(*numbers, clip=0.2)
    assert not math.isfinite(output.loss.item()) and not math.isfinite(gradient[0])


def test_micro_batches_add_up() -> None:
    rng = np.random.default_rng(0)
    new, old, returns = (rng.normal(size=6).tolist() for _ in range(3))
    whole, gradient = run(new, old, returns, clip=0.3)
    parts = [run(new[cut], old[cut], returns[cut], clip=0.3) for cut in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert sum(output.loss.item() for output, _ in parts) == pytest.approx(whole.loss.item())
    assert [number for _, part in parts for number in part] == pytest.approx(gradient)
    assert values(merge(output.metrics for output, _ in parts)) == pytest.approx(values(whole.metrics))
