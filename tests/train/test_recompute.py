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


@pytest.mark.parametrize(
    "layout",
    [ParallelismConfig(), ParallelismConfig(tensor=2, sequence=True), ParallelismConfig(pipeline=2)],
    ids=["one process", "tensor and sequence", "pipeline"],
)
def test_recomputation_gives_the_same_loss_and_gradient(
    world: DistWorld, policy_folder: Path, layout: ParallelismConfig
) -> None:
    settings = [setting for setting, _ in SETTINGS]
    for results in world.run(
        recomputed, parallelism=layout, folder=str(policy_folder), layout=layout, settings=settings
    ):
        plain_metrics, plain_gradients, plain_calls = results[0]
        assert set(plain_calls.values()) == {2}  # one call per micro-batch
        for (setting, repeated), (metrics, gradients, calls) in zip(SETTINGS, results, strict=True):
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
