"""What a step does to the weights, by another hand: plain arithmetic on the gradient of tests/train/plain.py.

Tolerance 1e-6 on weights of size 1: a step of fp32 sums in another order.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from megappo.config.optim import OptimConfig, OptimizerName
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld, RankError
from tests.train import plain
from tests.train.batches import MicroBatches, make_experience
from tests.train.jobs import train_once
from tests.train.training_jobs import resume_with, small_steps, train_steps, two_momentum_steps

ONE = ParallelismConfig()
IDS = make_experience().sequence_ids.tolist()
WHOLE: list[MicroBatches] = [[IDS]]
UNEVEN: list[MicroBatches] = [[IDS[5:], [IDS[0]]], [[], IDS[1:5]]]

DECAYS = {"*layernorm.weight": 0.5, "*.mlp.*": 0.0, "*.k_proj.weight": 0.3, "*": 0.1}
SGD = OptimConfig(name=OptimizerName.sgd, lr=0.1, weight_decay_of=DECAYS, clip_grad=0.2)


@cache
def plainly(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The starting weights, and the gradient after clipping."""
    weights = {name: p.detach().clone() for name, p in Qwen2ForCausalLM.from_pretrained(folder).named_parameters()}
    return weights, plain.train_actor(folder, make_experience(), SGD).gradients


def decay_of(name: str) -> float:
    """DECAYS by hand; query, key and value projections are one parameter, which a pattern for the key catches."""
    if "layernorm" in name:
        return 0.5
    if ".mlp." in name:
        return 0.0
    return 0.3 if any(f".{part}_proj.weight" in name for part in "qkv") else 0.1


@pytest.mark.parametrize(
    ("layout", "deal"),
    [(ONE, WHOLE), (ONE, UNEVEN), (ParallelismConfig(tensor=2), WHOLE)],
    ids=["one process", "data", "tensor"],
)
def test_sgd_steps_down_the_gradient_with_the_weight_decay_of_each_group(
    world: DistWorld, policy_folder: Path, layout: ParallelismConfig, deal: list[MicroBatches]
) -> None:
    results = world.run(
        train_once,
        world_size=layout.model_size * len(deal),
        parallelism=layout,
        role="actor",
        folder=str(policy_folder),
        layout=layout,
        optim=SGD,
        deal=deal,
    )
    weights, gradients = plainly(policy_folder)
    for name, found in results[0].weights.items():
        expected = weights[name] - 0.1 * (gradients[name] + decay_of(name) * weights[name])
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0, msg=name)


def test_a_weight_decay_pattern_that_matches_nothing_is_refused(world: DistWorld, policy_folder: Path) -> None:
    optim = OptimConfig(weight_decay_of={"*norm*": 0.1, "*.attention.*": 0.1})
    with pytest.raises(RankError, match=r"optim.weight_decay_of=\*.attention.\* matches no Hugging Face name"):
        world.run(
            train_steps, parallelism=ONE, folder=str(policy_folder), layout=ONE, optims=[optim], deal=WHOLE, epochs=1
        )


def test_momentum_carries_the_steps_before(world: DistWorld, policy_folder: Path) -> None:
    optim = OptimConfig(name=OptimizerName.sgd, lr=0.01, momentum=0.9, clip_grad=0.0)
    ((start, first, second, gradients),) = world.run(
        two_momentum_steps, parallelism=ONE, folder=str(policy_folder), optim=optim
    )
    for name, gradient in gradients.items():
        expected = first[name] + 0.9 * (first[name] - start[name]) - 0.01 * gradient
        torch.testing.assert_close(second[name], expected, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("name", [OptimizerName.adam, OptimizerName.sgd])
def test_overlapped_communication_changes_nothing_but_the_order_of_sums(
    world: DistWorld, policy_folder: Path, name: OptimizerName
) -> None:
    base = {"name": name, "lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
    # So small that the output weight (2,048 numbers), which no module multiplies with, is waited for by itself.
    small = {"overlap_grad_reduce": True, "overlap_bucket_params": 2000}
    optims = [OptimConfig(**base), OptimConfig(**base, **small)]
    if name is OptimizerName.adam:
        optims += [
            OptimConfig(**base, distributed=True, **small),
            OptimConfig(**base, distributed=True, overlap_param_gather=True, **small),
            OptimConfig(**base, distributed=True, overlap_param_gather=True, overlap_grad_reduce=True),
        ]
    ranks = world.run(
        train_steps,
        world_size=2,
        parallelism=ONE,
        folder=str(policy_folder),
        layout=ONE,
        optims=optims,
        deal=UNEVEN,
        epochs=3,
    )
    for plain_weights, *others in ranks:
        for optim, weights in zip(optims[1:], others, strict=True):
            for parameter, weight in weights.items():
                torch.testing.assert_close(
                    weight, plain_weights[parameter], atol=1e-6, rtol=0, msg=f"{optim}{parameter}"
                )


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_steps_too_small_for_16_bits_add_up_in_the_master_weights(
    world: DistWorld, policy_folder: Path, distributed: bool
) -> None:
    optim = OptimConfig(lr=1e-7, distributed=distributed)
    (result,) = world.run(small_steps, parallelism=ONE, folder=str(policy_folder), optim=optim, epochs=4)
    assert result["model dtypes"] == {torch.bfloat16}
    assert result["master dtypes"] == result["gradient dtypes"] == {torch.float32}
    # Adam moves a weight by about lr a step; 16-bit weights around 0.1 are 5e-4 apart.
    assert 2e-7 < result["master moved"] < 6e-7
    assert result["same weights"] > result["number of weights"] / 2


def test_a_resumed_run_has_the_settings_it_was_given(world: DistWorld, policy_folder: Path, tmp_path: Path) -> None:
    saved = OptimConfig(lr=1e-2, weight_decay=0.1)
    resumed = OptimConfig(lr=1e-2, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3)
    (found,) = world.run(
        resume_with, parallelism=ONE, folder=str(policy_folder), saved=saved, resumed=resumed, checkpoint=str(tmp_path)
    )
    assert found == {"steps": 2, "decays": [0.0, 0.3], "betas": {(0.8, 0.9)}, "eps": {1e-3}}
