"""Rules about optimizer, schedule and recomputation: what each refuses, in words, and what it lets pass."""

from dataclasses import replace
from typing import Any

import pytest

from megappo.config.memory import RecomputeConfig, RecomputeGranularity, RecomputeMethod
from megappo.config.optim import DecayShape, OptimizerName, ScheduleKind
from megappo.config.parallelism import ParallelismConfig
from megappo.config.rules import check_config
from megappo.config.run import RunConfig


def messages(config: RunConfig) -> list[str]:
    return [str(violation) for violation in check_config(config)]


@pytest.mark.parametrize(
    ("final_decay_steps", "message"),
    [
        (None, "actor.optim.final_decay_steps=None must be given with schedule=wsd, at most decay_steps - warmup"),
        (
            91,
            "actor.optim.final_decay_steps=91 must be given with schedule=wsd, at most decay_steps - warmup_steps = 90",
        ),
    ],
)
def test_wsd_says_how_long_it_falls(config: RunConfig, final_decay_steps: int | None, message: str) -> None:
    optim = config.actor.optim
    optim.schedule, optim.warmup_steps, optim.decay_steps = ScheduleKind.wsd, 10, 100
    optim.final_decay_steps = final_decay_steps
    (found,) = messages(config)
    assert found.startswith(message) and found.endswith("(use 9 for the last tenth)")
    optim.final_decay_steps = 90
    assert messages(config) == []


def test_other_schedules_have_no_final_decay(config: RunConfig) -> None:
    config.actor.optim.final_decay_steps = 10
    (found,) = messages(config)
    assert found.startswith("actor.optim.final_decay_steps=10 has no use with schedule=constant")


def test_settings_of_another_optimizer_are_refused(config: RunConfig) -> None:
    config.actor.optim.momentum = 0.9
    (found,) = messages(config)
    assert found.startswith("actor.optim.momentum=0.9 has no use with name=adam")
    config.actor.optim.name = OptimizerName.sgd
    assert messages(config) == []
    config.actor.optim.distributed = True
    (found,) = messages(config)
    assert found.startswith("actor.optim.distributed=True needs name=adam")


def test_weight_decays_are_not_negative(config: RunConfig) -> None:
    config.actor.optim.weight_decay_of = {"*norm*": 0.0, "lm_head.*": -0.1}
    assert messages(config) == ["actor.optim.weight_decay_of[lm_head.*]=-0.1 must not be negative (use 0 for no decay)"]


@pytest.mark.parametrize(("distributed", "grads"), [(False, False), (True, False), (False, True)])
def test_overlapped_gathering_needs_the_distributed_optimizer_and_buckets(
    config: RunConfig, distributed: bool, grads: bool
) -> None:
    optim = config.actor.optim
    optim.overlap_param_gather, optim.distributed, optim.overlap_grad_reduce = True, distributed, grads
    (found,) = messages(config)
    assert found.startswith("actor.optim.overlap_param_gather=True needs actor.optim.distributed=true and")
    optim.distributed = optim.overlap_grad_reduce = True
    assert messages(config) == []


def test_selective_recomputation_names_modules_that_can_be_recomputed(config: RunConfig) -> None:
    recompute = config.model.recompute
    recompute.modules = ["layernorm"]
    recompute.granularity = RecomputeGranularity.selective
    (found,) = messages(config)
    assert found == (
        "model.recompute.modules=layernorm is no module that can be recomputed alone "
        "(use core_attn, mlp, moe, or granularity=full)"
    )
    recompute.modules = []
    (found,) = messages(config)
    assert found.startswith("model.recompute.modules=[] must not be empty")


NONE, SELECTIVE, FULL = RecomputeGranularity.none, RecomputeGranularity.selective, RecomputeGranularity.full
BLOCK = RecomputeMethod.block


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        (RecomputeConfig(num_layers=2), "num_layers=2 has no use with model.recompute.granularity=none"),
        (RecomputeConfig(method=BLOCK), "method=block has no use with model.recompute.granularity=none"),
        (RecomputeConfig(modules=["mlp"]), "modules=['mlp'] has no use with model.recompute.granularity=none"),
        (RecomputeConfig(modules=["wrong"]), "modules=['wrong'] has no use with model.recompute.granularity=none"),
        (RecomputeConfig(granularity=FULL, modules=["mlp"]), "modules=['mlp'] has no use with model.recompute.gran"),
        (RecomputeConfig(granularity=SELECTIVE, num_layers=2), "num_layers=2 has no use with model.recompute.gran"),
        (RecomputeConfig(granularity=SELECTIVE, method=BLOCK), "method=block has no use with model.recompute.gran"),
        (RecomputeConfig(granularity=FULL, method=BLOCK, num_layers=2), None),
        (RecomputeConfig(granularity=SELECTIVE, modules=["mlp"]), None),
        (RecomputeConfig(granularity=NONE), None),
    ],
)
def test_recomputation_takes_no_setting_that_it_does_not_read(
    config: RunConfig, recompute: RecomputeConfig, message: str | None
) -> None:
    config.model.recompute = recompute
    found = messages(config)
    assert len(found) == (message is not None)
    assert all(text.startswith(f"model.recompute.{message}") for text in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay_steps": 10}, "decay_steps=10 has no use with actor.optim.schedule=constant (leave it out)"),
        ({"min_lr": 1e-8}, "min_lr=1e-08 has no use with actor.optim.schedule=constant (leave it out)"),
        ({"final_decay_shape": DecayShape.cosine}, "final_decay_shape=cosine has no use with actor.optim.schedule=con"),
        (
            {"final_decay_shape": DecayShape.cosine, "schedule": ScheduleKind.linear, "decay_steps": 9},
            "final_decay_shape=cosine has no use with actor.optim.schedule=linear",
        ),
        ({"name": OptimizerName.sgd, "beta1": 0.8}, "beta1=0.8 has no use with actor.optim.name=sgd"),
        ({"name": OptimizerName.sgd, "beta2": 0.8}, "beta2=0.8 has no use with actor.optim.name=sgd"),
        ({"name": OptimizerName.sgd, "eps": 1e-4}, "eps=0.0001 has no use with actor.optim.name=sgd"),
        ({"overlap_bucket_params": 100}, "overlap_bucket_params=100 has no use with actor.optim.overlap_grad_reduce="),
        ({"overlap_bucket_params": 100, "overlap_grad_reduce": True}, None),
        ({"beta1": 0.8, "beta2": 0.9, "eps": 1e-4}, None),
        ({"schedule": ScheduleKind.cosine, "decay_steps": 9, "min_lr": 1e-8}, None),
    ],
)
def test_an_optimizer_takes_no_setting_that_it_does_not_read(
    config: RunConfig, settings: dict[str, Any], message: str | None
) -> None:
    config.actor.optim = replace(config.actor.optim, **settings)
    found = messages(config)
    assert len(found) == (message is not None)
    assert all(text.startswith(f"actor.optim.{message}") for text in found)


@pytest.mark.parametrize(
    ("method", "num_layers", "stages", "message"),
    [
        (
            RecomputeMethod.uniform,
            3,
            1,
            "must divide the 4 layers of a stage of actor with method=uniform (use 1, 2 or 4)",
        ),
        (RecomputeMethod.block, 3, 2, "must be at most the 2 layers of a stage of actor (use 1 to 2)"),
        (RecomputeMethod.block, 3, 1, None),
        (RecomputeMethod.uniform, 2, 2, None),
    ],
)
def test_full_recomputation_fits_the_layers_of_a_stage(
    config: RunConfig, method: RecomputeMethod, num_layers: int, stages: int, message: str | None
) -> None:
    recompute = config.model.recompute
    recompute.granularity, recompute.method = RecomputeGranularity.full, method
    recompute.num_layers, config.actor.parallelism.pipeline = num_layers, stages
    expected = [] if message is None else [f"model.recompute.num_layers={num_layers} {message}"]
    assert messages(config) == expected


@pytest.mark.parametrize(
    ("layout", "num_layers", "message"),
    [
        (
            ParallelismConfig(pipeline=2, first_stage_layers=1),
            3,
            "must divide the 1 layers of a stage of actor with method=uniform (use 1)",
        ),
        (ParallelismConfig(pipeline=2, first_stage_layers=1), 1, None),
        (
            ParallelismConfig(pipeline=2, virtual_pipeline=2),
            2,
            "must divide the 1 layers of a chunk of a stage of actor with method=uniform (use 1)",
        ),
        # 2 of the 4 + 2 parts on each stage.
        (ParallelismConfig(pipeline=3, embedding_is_layer=True, head_is_layer=True), 2, "must divide the 1 layers"),
    ],
)
def test_uneven_stages_and_chunks_are_counted(
    config: RunConfig, layout: ParallelismConfig, num_layers: int, message: str | None
) -> None:
    config.cluster.pools = {"main": layout.pipeline}
    config.model.recompute = RecomputeConfig(granularity=RecomputeGranularity.full, num_layers=num_layers)
    config.actor.parallelism = layout
    found = messages(config)
    assert len(found) == (message is not None)
    assert all(text.startswith(f"model.recompute.num_layers={num_layers} {message}") for text in found)
