"""How experts may be spread, before a run and where a model is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.expert_rules import ExpertShape, expert_violations
from megappo.config.model_shape import shape_of
from megappo.config.parallelism import ParallelismConfig
from megappo.config.rules import check_config, check_files
from megappo.config.run import RunConfig

SHAPE = ExpertShape(num_experts=12, ffn_hidden_size=20)


@pytest.mark.parametrize(
    ("layout", "experts", "message"),
    [
        (
            ParallelismConfig(expert=2, expert_tensor=1),
            None,
            "actor.parallelism.expert=2 is for mixtures of experts, and the model is dense (use 1)",
        ),
        (
            ParallelismConfig(expert_tensor=2),
            None,
            "actor.parallelism.expert_tensor=2 is for mixtures of experts, and the model is dense (use 1)",
        ),
        (
            ParallelismConfig(expert=5),
            SHAPE,
            "actor.parallelism.expert=5 must divide the 12 experts of the model (use 1, 2, 3, 4, 6 or 12)",
        ),
        (
            ParallelismConfig(expert_tensor=3),
            SHAPE,
            "actor.parallelism.expert_tensor=3 must divide the 20 features of an expert of the model "
            "(use 1, 2, 4, 5, 10 or 20)",
        ),
        (
            ParallelismConfig(tensor=2),
            SHAPE,
            "actor.parallelism.sequence=False must be true for a mixture of experts with actor.parallelism.tensor=2: "
            "else every tensor-parallel rank would send the same tokens to the experts (set it to true)",
        ),
    ],
)
def test_a_layout_that_does_not_suit_the_experts_is_refused(
    layout: ParallelismConfig, experts: ExpertShape | None, message: str
) -> None:
    assert [str(violation) for violation in expert_violations(layout, experts, key="actor.parallelism")] == [message]


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (ParallelismConfig(tensor=4), None),
        (ParallelismConfig(expert=4, expert_tensor=5), SHAPE),
        (ParallelismConfig(tensor=2, sequence=True, expert=12), SHAPE),
    ],
)
def test_a_layout_that_suits_them_is_not(layout: ParallelismConfig, experts: ExpertShape | None) -> None:
    assert expert_violations(layout, experts, key="actor.parallelism") == []


def test_experts_divide_the_ranks_of_a_stage_of_their_pool(config: RunConfig) -> None:
    config.cluster.pools = {"main": 12}
    config.actor.parallelism.pipeline = 2
    config.actor.parallelism.expert = 4
    violation = next(found for found in check_config(config) if found.key == "actor.parallelism.expert")
    assert str(violation) == (
        "actor.parallelism.expert=4 times actor.parallelism.expert_tensor=1 must divide the 6 ranks of a pipeline "
        "stage (12 devices of pool 'main' / 2 stages) (make the product one of 1, 2, 3 or 6, or change "
        "cluster.pools.main)"
    )
    config.actor.parallelism.expert = 3
    rules = [found.rule for found in check_config(config)]
    assert rules == ["is for mixtures of experts, and the model is dense"]  # the model that sft makes


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("content", "experts", "dense"),
    [
        (QWEN3_MOE, SHAPE, None),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, SHAPE, 96),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, SHAPE, 96),
        (QWEN3_MOE | {"num_experts": 0}, None, 96),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1, 2, 3]}, None, 96),
        (
            {"model_type": "mixtral", "num_local_experts": 12, "num_experts_per_tok": 2, "intermediate_size": 20},
            SHAPE,
            None,
        ),
        ({}, None, 96),
    ],
)
def test_sizes_of_experts_are_read_from_the_folder(
    use_model: Callable[[dict[str, Any]], Path],
    content: dict[str, object],
    experts: ExpertShape | None,
    dense: int | None,
) -> None:
    shape = shape_of(json.loads((use_model(content) / "config.json").read_text()))
    assert (shape.experts, shape.ffn_hidden_size) == (experts, dense)


def test_the_folder_is_held_against_the_layout(config: RunConfig, use_model: Callable[[dict[str, Any]], Path]) -> None:
    use_model(QWEN3_MOE | {"intermediate_size": 45, "mlp_only_layers": [0]})
    config.actor.parallelism = ParallelismConfig(tensor=2, expert=5)
    assert [violation.key for violation in check_files(config)] == [
        "actor.parallelism.tensor",
        "actor.parallelism.expert",
        "actor.parallelism.sequence",
    ]


@pytest.mark.parametrize("content", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_an_engine_that_takes_dense_layers_for_sparse_ones_is_refused(
    content: dict[str, object], config: RunConfig, use_model: Callable[[dict[str, Any]], Path]
) -> None:
    use_model(QWEN3_MOE | content)
    assert "rollout.engine" not in [violation.key for violation in check_files(config)], "of the engine hf"
    config.rollout.engine = "sglang"
    found = next(violation for violation in check_files(config) if violation.key == "rollout.engine")
    assert found.value == "sglang" and "use rollout=hf" in found.remedy
    use_model(QWEN3_MOE)
    assert "rollout.engine" not in [violation.key for violation in check_files(config)]
