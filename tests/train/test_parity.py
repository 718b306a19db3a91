"""Actor and critic in every layout against the same mathematics written plainly (tests/train/plain.py).

Tolerances: fp32 sums in another order. Log-probs 1e-5, loss 1e-6, gradients 1e-5 of the largest entry of their tensor,
weights after one AdamW step with eps 1e-4 (which keeps the step smooth where gradients are near 0) 1e-5.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train import plain
from tests.train.batches import MicroBatches, make_experience
from tests.train.jobs import scattered, train_once

OPTIM = OptimConfig(lr=1e-3, eps=1e-4, beta2=0.95, weight_decay=0.1, clip_grad=0.2)
DISTRIBUTED = OptimConfig(lr=1e-3, eps=1e-4, beta2=0.95, weight_decay=0.1, clip_grad=0.2, distributed=True)
IDS = make_experience().sequence_ids.tolist()
WHOLE: list[MicroBatches] = [[IDS]]
SPLIT: list[MicroBatches] = [[[IDS[6]], IDS[1:4], [], [IDS[7], IDS[0]], IDS[4:6]]]
IDLE: list[MicroBatches] = [[IDS], [[]]]
UNEVEN: list[MicroBatches] = [[IDS[5:], [IDS[0]]], [[], IDS[1:5]]]

LAYOUTS = {
    "one process": (ParallelismConfig(), OPTIM, WHOLE),
    "one process, split and out of order": (ParallelismConfig(), OPTIM, SPLIT),
    "tensor": (ParallelismConfig(tensor=2), OPTIM, SPLIT),
    "tensor and sequence": (ParallelismConfig(tensor=2, sequence=True), OPTIM, SPLIT),
    "pipeline": (ParallelismConfig(pipeline=2), OPTIM, SPLIT),
    "virtual pipeline": (ParallelismConfig(pipeline=2, virtual_pipeline=2), OPTIM, SPLIT),
    "tensor, sequence and pipeline": (ParallelismConfig(tensor=2, pipeline=2, sequence=True), OPTIM, SPLIT),
    "a data rank without sequences": (ParallelismConfig(), OPTIM, IDLE),
    "uneven data ranks": (ParallelismConfig(), OPTIM, UNEVEN),
    "uneven data ranks, distributed optimizer": (ParallelismConfig(), DISTRIBUTED, UNEVEN),
    "tensor and data, distributed optimizer": (ParallelismConfig(tensor=2), DISTRIBUTED, UNEVEN),
}


@cache
def plainly(role: str, folder: Path) -> plain.PlainResult:
    train = plain.train_actor if role == "actor" else plain.train_critic
    return train(folder, make_experience(), OPTIM)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_layout_computes_what_plain_code_does(
    world: DistWorld, policy_folder: Path, critic_folder: Path, role: str, layout: str
) -> None:
    folder = policy_folder if role == "actor" else critic_folder
    check_parity(world, role, folder, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["one process", "pipeline", "tensor, sequence and pipeline"])
def test_tied_embeddings_learn_from_both_their_uses(world: DistWorld, tied_policy_folder: Path, layout: str) -> None:
    check_parity(world, "actor", tied_policy_folder, *LAYOUTS[layout])


def check_parity(
    world: DistWorld,
    role: str,
    folder: Path,
    parallelism: ParallelismConfig,
    optim: OptimConfig,
    deal: list[MicroBatches],
) -> None:
    expected = plainly(role, folder)
    size = parallelism.model_size * len(deal)
    results = world.run(
        train_once,
        world_size=size,
        parallelism=parallelism,
        role=role,
        folder=str(folder),
        layout=parallelism,
        optim=optim,
        deal=deal,
    )
    experience = make_experience()
    numbers = scattered(results, experience.sequence_ids, experience.offsets)
    np.testing.assert_allclose(numbers, expected.numbers, atol=1e-5, rtol=0)
    assert sum(result.numbers is not None for result in results) == len(deal)

    merged: dict[str, np.ndarray] = {}
    for result in results:
        for name, pair in result.metrics.items():
            merged[name] = merged.get(name, np.zeros(2)) + pair
    means = {name: total / count for name, (total, count) in merged.items()}
    assert means[f"{role}/loss/mean"] == pytest.approx(expected.loss, abs=1e-6)
    assert means[f"{role}/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert expected.grad_norm > OPTIM.clip_grad  # so that clipping is part of the comparison
    if role == "actor":
        assert means["forward actor/entropy/mean"] == pytest.approx(expected.entropy, abs=1e-5)

    for result in results:
        assert set(result.weights) <= set(expected.weights)
        for name, gradient in result.gradients.items():
            wanted = expected.gradients[name]
            assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
        for name, weight in result.weights.items():
            torch.testing.assert_close(weight, expected.weights[name], atol=1e-5, rtol=0, msg=name)
    assert set().union(*(result.weights for result in results)) == set(expected.weights)
