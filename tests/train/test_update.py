"""One update: what does not change its numbers, what it reports, what it refuses."""

from pathlib import Path

import pytest
import torch

from megappo.config.model import Dtype
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.batches import MicroBatches, make_experience
from tests.train.jobs import (
    metrics_without_old_log_probs,
    norms_by_threshold,
    refused_requests,
    starting_values,
    step_of_each_split,
)

ONE = ParallelismConfig()
IDS = make_experience().sequence_ids.tolist()
SPLITS: list[MicroBatches] = [
    [IDS],
    [list(reversed(IDS))],
    [[sequence] for sequence in IDS],
    [IDS[5:], [], IDS[:2], IDS[2:5]],
]


def test_neither_order_nor_split_of_micro_batches_changes_a_step(world: DistWorld, policy_folder: Path) -> None:
    first, *others = world.run(
        step_of_each_split, parallelism=ONE, folder=str(policy_folder), splits=SPLITS, dtype=Dtype.float32
    )[0]
    assert first.metrics["actor/first_step_log_ratio/max"] == 0
    for step in others:
        # The pass before the update used another split: the forward pass itself does not depend on it.
        assert step.metrics.pop("actor/first_step_log_ratio/max") <= 1e-5
        for name, value in step.metrics.items():
            # Counting metrics are exact, means and the norm are sums in another order.
            assert value == pytest.approx(first.metrics[name], rel=1e-5, abs=1e-6), name
        assert step.metrics["actor/loss/mean"] == pytest.approx(first.metrics["actor/loss/mean"], abs=1e-6)
        for name, gradient in step.gradients.items():
            wanted = first.gradients[name]
            assert (gradient - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name


def test_bfloat16_training_follows_fp32(world: DistWorld, policy_folder: Path) -> None:
    narrow, wide = (
        world.run(step_of_each_split, parallelism=ONE, folder=str(policy_folder), splits=SPLITS[3:], dtype=dtype)[0][0]
        for dtype in (Dtype.bfloat16, Dtype.float32)
    )
    # The same pass twice gives the same log-probs in any precision.
    assert narrow.metrics["actor/first_step_log_ratio/max"] == 0
    # 8 bits of mantissa through 4 layers: a few percent.
    assert narrow.metrics["actor/loss/mean"] == pytest.approx(wide.metrics["actor/loss/mean"], rel=0.1)
    for name, gradient in narrow.gradients.items():
        wanted = wide.gradients[name].flatten()
        assert torch.nn.functional.cosine_similarity(gradient.float().flatten(), wanted, dim=0) > 0.99, name


def test_without_old_log_probs_the_ratio_is_one_and_the_update_measures_the_entropy(
    world: DistWorld, policy_folder: Path
) -> None:
    metrics = world.run(metrics_without_old_log_probs, parallelism=ONE, folder=str(policy_folder))[0]
    assert metrics["actor/ratio/min"] == metrics["actor/ratio/max"] == 1.0
    assert 0 < metrics["actor/entropy/mean"] < 4.16  # log 64


def test_selected_tokens_lose_their_gradient(world: DistWorld, policy_folder: Path) -> None:
    # Keys of clip_cov are in [0, 1): none, about half, all of the tokens are selected.
    none, half, every = world.run(
        norms_by_threshold, parallelism=ONE, folder=str(policy_folder), thresholds=[2.0, 0.5, 0.0]
    )[0]
    assert none > 0 and half > 0 and none != half
    assert every == 0


def test_requests_that_do_not_fit_the_batch_are_refused(world: DistWorld, policy_folder: Path) -> None:
    missing, unweighted, without_values = world.run(refused_requests, parallelism=ONE, folder=str(policy_folder))[0]
    assert missing == "micro-batches name 7 sequences, the batch has 8"
    assert unweighted.startswith(f"loss_weights lacks sequence ids [{IDS[1]}")
    assert "Experience.values" in without_values


def test_a_critic_made_from_a_policy_starts_with_values_of_zero(world: DistWorld, policy_folder: Path) -> None:
    assert (world.run(starting_values, parallelism=ONE, folder=str(policy_folder))[0] == 0).all()
