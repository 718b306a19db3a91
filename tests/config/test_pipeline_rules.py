"""How layers are shared by pipeline stages and their chunks, and heads by context-parallel ranks."""

from typing import Any

import pytest

from megappo.config.cluster import DeviceKind
from megappo.config.model import LayerSpec
from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import pipeline_violations
from megappo.config.rules import check_config
from megappo.config.run import RunConfig


def messages(num_layers: int, **options: Any) -> list[str]:
    layout = ParallelismConfig(**options)
    return [str(violation) for violation in pipeline_violations(layout, num_layers, key="actor.parallelism")]


@pytest.mark.parametrize(
    ("num_layers", "options"),
    [
        (5, {}),
        (6, {"pipeline": 2}),
        (5, {"pipeline": 2, "first_stage_layers": 2}),
        (5, {"pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 3}),
        (7, {"pipeline": 3, "last_stage_layers": 1}),
        (6, {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 2}),
        (6, {"pipeline": 4, "embedding_is_layer": True, "head_is_layer": True}),
        (7, {"pipeline": 2, "virtual_pipeline": 2, "head_is_layer": True}),
    ],
)
def test_layouts_that_share_all_layers_pass(num_layers: int, options: dict[str, Any]) -> None:
    assert messages(num_layers, **options) == []


@pytest.mark.parametrize(
    ("num_layers", "options", "message"),
    [
        (
            5,
            {"pipeline": 2},
            "actor.parallelism.pipeline=2 must divide model.num_hidden_layers=5 "
            "(use 1 or 5, or give first_stage_layers or last_stage_layers)",
        ),
        (4, {"first_stage_layers": 2}, "actor.parallelism.first_stage_layers=2 needs actor.parallelism.pipeline > 1"),
        (
            6,
            {"pipeline": 2, "first_stage_layers": 2, "head_is_layer": True},
            "actor.parallelism.head_is_layer=True cannot be combined with actor.parallelism.first_stage_layers",
        ),
        (
            5,
            {"pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            "actor.parallelism.first_stage_layers=2 and last_stage_layers=2, the only stages, must hold the 5 layers "
            "of the model, not 4 (make their sum 5)",
        ),
        (
            2,
            {"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 2},
            "actor.parallelism.first_stage_layers=1 and last_stage_layers=2, the only stages, must hold the 2 layers "
            "of the model, not 3 (make their sum 2)",
        ),
        (
            6,
            {"pipeline": 3, "first_stage_layers": 3, "last_stage_layers": 4},
            "actor.parallelism.first_stage_layers=3 and last_stage_layers=4 leave 0 of model.num_hidden_layers=6 for "
            "the other stage (leave 1 or more)",
        ),
        (
            6,
            {"pipeline": 3, "last_stage_layers": 1},
            "actor.parallelism.last_stage_layers=1 leaves 5 of model.num_hidden_layers=6 for the other 2 stages",
        ),
        (2, {"pipeline": 3, "first_stage_layers": 2}, "actor.parallelism.first_stage_layers=2 leaves 0 of"),
        (
            6,
            {"pipeline": 4, "embedding_is_layer": True},
            "actor.parallelism.pipeline=4 must divide model.num_hidden_layers=6 and 1 for embedding and head",
        ),
        (
            6,
            {"pipeline": 2, "virtual_pipeline": 2},
            "actor.parallelism.virtual_pipeline=2 times 2 stages must divide model.num_hidden_layers=6 "
            "(use one of 1 or 3, or null)",
        ),
        (
            7,
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3},
            "actor.parallelism.virtual_pipeline=2 must divide the 3 layers of a stage",
        ),
        (
            3,
            {"pipeline": 2, "virtual_pipeline": 2, "head_is_layer": True},
            "actor.parallelism.head_is_layer=True leaves a model chunk without layers",
        ),
    ],
)
def test_a_layout_that_leaves_layers_over_is_refused_with_the_reason(
    num_layers: int, options: dict[str, Any], message: str
) -> None:
    (found,) = messages(num_layers, **options)
    assert found.startswith(message)


def test_context_parallelism_of_the_local_layer_spec_divides_the_heads(config: RunConfig) -> None:
    # The model that sft makes has 4 heads and 2 key/value heads.
    config.cluster.pools, config.cluster.device = {"main": 8}, DeviceKind.cpu
    config.actor.parallelism.tensor, config.actor.parallelism.context = 2, 4
    (violation,) = check_config(config)
    assert str(violation) == (
        "actor.parallelism.context=4 must divide the 2 attention heads of a tensor-parallel rank (use 1 or 2)"
    )
    config.actor.parallelism.context = 2
    assert check_config(config) == []


def test_transformer_engine_splits_sequences_whatever_the_heads(config: RunConfig) -> None:
    config.cluster.pools, config.cluster.device = {"main": 8, "engines": 1}, DeviceKind.cuda
    config.cluster.rollout = "engines"
    config.actor.parallelism.context = 8
    config.model.layer_spec = LayerSpec.transformer_engine
    assert "actor.parallelism.context" not in [violation.key for violation in check_config(config)]
    config.model.layer_spec = LayerSpec.local
    assert [violation.key for violation in check_config(config)] == ["actor.parallelism.context"]
