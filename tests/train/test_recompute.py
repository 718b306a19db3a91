"""Recomputed activations change no number, only how often modules run."""

from pathlib import Path

import pytest
import torch

from megappo.config.memory import RecomputeConfig, RecomputeGranularity, RecomputeMethod
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.training_jobs import recompute_error, recomputed


def full(method: RecomputeMethod, num_layers: int) -> RecomputeConfig:
    return RecomputeConfig(granularity=RecomputeGranularity.full, method=method, num_layers=num_layers)


def selective(*modules: str) -> RecomputeConfig:
    return RecomputeConfig(granularity=RecomputeGranularity.selective, modules=list(modules))


# Setting -> modules of the first layer that run once more in backward.
SETTINGS = [
    (RecomputeConfig(), set()),
    (full(RecomputeMethod.uniform, 1), {"layer", "core_attn", "mlp", "layernorm"}),
    (full(RecomputeMethod.uniform, 2), {"layer", "core_attn", "mlp", "layernorm"}),
    (full(RecomputeMethod.block, 1), {"layer", "core_attn", "mlp", "layernorm"}),
    (selective("core_attn"), {"core_attn"}),
    (selective("mlp"), {"mlp"}),
    (selective("core_attn", "mlp"), {"core_attn", "mlp"}),
]


# Of a mixture of experts. Its feed-forward part calls what it recomputes itself.
EXPERT_SETTINGS = [
    (RecomputeConfig(), set()),
    (full(RecomputeMethod.uniform, 1), {"layer", "core_attn", "mlp", "layernorm", "router"}),
    (selective("moe"), {"router"}),
    (selective("core_attn", "moe"), {"core_attn", "router"}),
]


@pytest.mark.parametrize(
    "layout",
    [ParallelismConfig(), ParallelismConfig(tensor=2, sequence=True), ParallelismConfig(pipeline=2)],
    ids=["one process", "tensor and sequence", "pipeline"],
)
def test_recomputation_gives_the_same_loss_and_gradient(
    world: DistWorld, policy_folder: Path, layout: ParallelismConfig
) -> None:
    check(world, policy_folder, layout, SETTINGS)


def test_recomputed_experts_give_the_same_loss_and_gradient(world: DistWorld, expert_policy_folder: Path) -> None:
    check(world, expert_policy_folder, ParallelismConfig(expert=2), EXPERT_SETTINGS, world_size=2)


def check(
    world: DistWorld,
    folder: Path,
    layout: ParallelismConfig,
    table: list[tuple[RecomputeConfig, set[str]]],
    world_size: int | None = None,
) -> None:
    settings = [setting for setting, _ in table]
    for results in world.run(
        recomputed, world_size=world_size, parallelism=layout, folder=str(folder), layout=layout, settings=settings
    ):
        plain_metrics, plain_gradients, plain_calls = results[0]
        assert set(plain_calls.values()) == {2}  # one call per micro-batch
        for (setting, repeated), (metrics, gradients, calls) in zip(table, results, strict=True):
            assert metrics == plain_metrics, setting
            assert all(torch.equal(gradients[name], plain_gradients[name]) for name in plain_gradients), setting
            assert calls == {name: 4 if name in repeated else 2 for name in calls}, setting


@pytest.mark.parametrize(
    ("method", "num_layers", "message"),
    [
        (RecomputeMethod.uniform, 3, "must divide the 4 layers"),
        (RecomputeMethod.block, 5, "must be at most the 4 layers"),
    ],
)
def test_numbers_of_layers_that_do_not_fit_are_refused(
    world: DistWorld, policy_folder: Path, method: RecomputeMethod, num_layers: int, message: str
) -> None:
    one = ParallelismConfig()
    (error,) = world.run(
        recompute_error, parallelism=one, folder=str(policy_folder), layout=one, recompute=full(method, num_layers)
    )
    assert f"model.recompute.num_layers={num_layers} {message}" in error
