"""Actor and critic in every layout against the same mathematics written plainly (tests/train/plain.py).

Tolerances: fp32 sums in another order. Log-probs and values 1e-5, loss 1e-6, gradients 1e-5 of the largest entry of
their tensor, weights after one AdamW step with eps 1e-4 (which keeps the step smooth where gradients are near 0) 1e-5.
What was measured is recorded as the property `parity` of each test (`pytest --junitxml FILE`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megappo.config.optim import OptimConfig, OptimizerName
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train import plain
from tests.train.batches import MicroBatches, make_experience
from tests.train.jobs import RankResult, scattered, train_once
from tests.train.training_jobs import weights_after_steps

OPTIM = OptimConfig(lr=1e-3, eps=1e-4, beta2=0.95, weight_decay=0.1, clip_grad=0.2)
DISTRIBUTED = replace(OPTIM, distributed=True)
IDS = make_experience().sequence_ids.tolist()
WHOLE: list[MicroBatches] = [[IDS]]
# Uneven micro-batches, as a cap of tokens makes them, out of order, one of them empty.
SPLIT: list[MicroBatches] = [[[IDS[6]], IDS[1:4], [], [IDS[7], IDS[0]], IDS[4:6]]]
IDLE: list[MicroBatches] = [[IDS], [[]]]
UNEVEN: list[MicroBatches] = [[IDS[5:], [IDS[0]]], [[], IDS[1:5]]]
# One data rank has three micro-batches, the other one: they meet in the experts of every layer.
LOPSIDED: list[MicroBatches] = [[IDS[5:], [IDS[0]], IDS[1:3]], [IDS[3:5]]]


@dataclass(kw_only=True)
class Case:
    """One row of the table."""

    layout: ParallelismConfig
    deal: list[MicroBatches]
    """Micro-batches of each data-parallel rank."""
    optim: OptimConfig


def row(
    name: str, *, deal: list[MicroBatches] = SPLIT, optim: OptimConfig = OPTIM, slow: bool = False, **axes: Any
) -> Any:  # Any: pytest's parameter set
    case = Case(layout=ParallelismConfig(**axes), deal=deal, optim=optim)
    return pytest.param(case, id=name, marks=[pytest.mark.slow] if slow else [])


LAYOUTS = [
    row("one process", deal=WHOLE),
    row("one process, split and out of order"),
    row("tensor", tensor=2),
    row("tensor and sequence", tensor=2, sequence=True, slow=True),
    row("pipeline", pipeline=2),
    row("uneven pipeline", pipeline=2, first_stage_layers=1),
    row("uneven pipeline, the last stage given", pipeline=2, last_stage_layers=1, slow=True),
    row("embedding and head count as layers", pipeline=3, embedding_is_layer=True, head_is_layer=True, slow=True),
    row("virtual pipeline", pipeline=2, virtual_pipeline=2),
    row("tensor, sequence and pipeline", tensor=2, pipeline=2, sequence=True),
    row("tensor, sequence, virtual pipeline", tensor=2, pipeline=2, virtual_pipeline=2, sequence=True, slow=True),
    row("context", context=2),
    row("context 4", context=4, slow=True),
    row("tensor and context", tensor=2, context=2, slow=True),
    row("tensor, sequence and context", tensor=2, sequence=True, context=2, slow=True),
    row("pipeline and context", pipeline=2, context=2, slow=True),
    row("virtual pipeline and context", pipeline=2, virtual_pipeline=2, context=2, slow=True),
    row("context and data, distributed optimizer", context=2, deal=UNEVEN, optim=DISTRIBUTED, slow=True),
    row("a data rank without sequences", deal=IDLE),
    row("uneven data ranks", deal=UNEVEN),
    row("uneven data ranks, distributed optimizer", deal=UNEVEN, optim=DISTRIBUTED),
    row("tensor and data", tensor=2, deal=UNEVEN, slow=True),
    row("tensor and data, distributed optimizer", tensor=2, deal=UNEVEN, optim=DISTRIBUTED, slow=True),
    row("pipeline and data", pipeline=2, deal=UNEVEN, slow=True),
]
OF_CRITIC = ("one process, split and out of order", "tensor, sequence and pipeline", "context", "uneven data ranks")
"""Layouts of the critic that are tried in one step, too; three steps of SGD are those of both models."""
LAYOUTS_OF_ROLES = [
    pytest.param(
        role, *case.values, id=f"{role}, {case.id}", marks=[*case.marks, *([pytest.mark.slow] if is_slow else [])]
    )
    for role in ("actor", "critic")
    for case in LAYOUTS
    for is_slow in [role == "critic" and case.id not in OF_CRITIC]
]
EXPERT_LAYOUTS = [
    row("one process", deal=WHOLE, slow=True),
    row("expert", expert=2, deal=UNEVEN),
    row("expert and tensor", tensor=2, sequence=True, expert=2, slow=True),
    row("expert over replicas, tensor", tensor=2, sequence=True, expert=2, deal=UNEVEN, slow=True),
    row("expert and pipeline", pipeline=2, expert=2, deal=UNEVEN, slow=True),
    row("expert tensor", tensor=2, sequence=True, expert_tensor=2, slow=True),
    row("expert and context", context=2, expert=2, slow=True),
    row("expert, distributed optimizer", expert=2, deal=UNEVEN, optim=DISTRIBUTED, slow=True),
    row("expert, another number of micro-batches on each data rank", expert=2, deal=LOPSIDED),
    row("whole experts on tensor ranks", tensor=2, sequence=True),
]
TIED_LAYOUTS = [
    row("one process", deal=WHOLE),
    row("pipeline", pipeline=2),
    row("virtual pipeline", pipeline=2, virtual_pipeline=2, slow=True),
    row("tensor, sequence and pipeline", tensor=2, pipeline=2, sequence=True),
    row("pipeline and context", pipeline=2, context=2, slow=True),
    row("pipeline and data, distributed optimizer", pipeline=2, deal=UNEVEN, optim=DISTRIBUTED, slow=True),
]

# Rows of both tables: weights after steps of SGD tell a gradient of the wrong size, which those of Adam hardly do.
SGD = OptimConfig(name=OptimizerName.sgd, lr=0.3, momentum=0.9, weight_decay=0.1, clip_grad=OPTIM.clip_grad)
SGD_STEPS = 3
SGD_LAYOUTS = [
    row("tensor", tensor=2, slow=True),
    row("pipeline", pipeline=2, slow=True),
    row("tensor, sequence and pipeline", tensor=2, pipeline=2, sequence=True),
    row("virtual pipeline", pipeline=2, virtual_pipeline=2),
    row("context", context=2),
    row("uneven data ranks", deal=UNEVEN),
]
SGD_EXPERT_LAYOUTS = [row("expert", expert=2, deal=UNEVEN)]

Record = Callable[[str, object], None]


@cache
def plainly(role: str, folder: Path) -> plain.PlainResult:
    train = plain.train_actor if role == "actor" else plain.train_critic
    return train(folder, make_experience(), OPTIM)


@pytest.mark.parametrize(("role", "case"), LAYOUTS_OF_ROLES)
def test_every_layout_computes_what_plain_code_does(
    world: DistWorld, policy_folder: Path, critic_folder: Path, role: str, case: Case, record_property: Record
) -> None:
    folder = policy_folder if role == "actor" else critic_folder
    check_parity(run(world, role, folder, case), plainly(role, folder), role, case, record_property)


@pytest.mark.parametrize("case", EXPERT_LAYOUTS)
def test_every_layout_of_experts_computes_what_plain_code_does(
    world: DistWorld, expert_policy_folder: Path, case: Case, record_property: Record
) -> None:
    results = run(world, "actor", expert_policy_folder, case)
    check_parity(results, plainly("actor", expert_policy_folder), "actor", case, record_property)


def test_no_choice_of_experts_is_close(expert_policy_folder: Path) -> None:
    """Otherwise rounding would choose others, and the comparison above would be one of luck."""
    assert plain.smallest_router_margin(expert_policy_folder, make_experience()) > 1e-4


@pytest.mark.parametrize("case", TIED_LAYOUTS)
def test_tied_embeddings_learn_from_both_their_uses_and_stay_equal(
    world: DistWorld, tied_policy_folder: Path, case: Case, record_property: Record
) -> None:
    results = run(world, "actor", tied_policy_folder, case)
    check_parity(results, plainly("actor", tied_policy_folder), "actor", case, record_property)
    copies: dict[int, list[torch.Tensor]] = {}
    for result in results:
        copies.setdefault(result.tensor_rank, []).extend(result.embeddings)
    for shards in copies.values():
        assert len(shards) >= case.layout.pipeline * len(case.deal)  # on the first and on the last stage
        assert all(torch.equal(shard, shards[0]) for shard in shards[1:])


@pytest.mark.parametrize("case", SGD_LAYOUTS)
def test_three_steps_of_sgd_give_the_weights_of_plain_code(
    world: DistWorld, policy_folder: Path, critic_folder: Path, case: Case, record_property: Record
) -> None:
    check_sgd(world, {"actor": policy_folder, "critic": critic_folder}, case, record_property)


@pytest.mark.parametrize("case", SGD_EXPERT_LAYOUTS)
def test_three_steps_of_sgd_give_the_experts_of_plain_code(
    world: DistWorld, expert_policy_folder: Path, case: Case, record_property: Record
) -> None:
    check_sgd(world, {"actor": expert_policy_folder}, case, record_property)


@cache
def plainly_by_sgd(role: str, folder: Path) -> dict[str, torch.Tensor]:
    return plain.weights_after_sgd(role, folder, make_experience(), SGD, steps=SGD_STEPS)


def check_sgd(world: DistWorld, folders: dict[str, Path], case: Case, record: Record) -> None:
    results = world.run(
        weights_after_steps,
        world_size=case.layout.model_size * len(case.deal),
        parallelism=case.layout,
        folders={role: str(folder) for role, folder in folders.items()},
        layout=case.layout,
        optim=SGD,
        deal=case.deal,
        steps=SGD_STEPS,
    )
    errors = {}
    for role, folder in folders.items():
        expected, start = plainly_by_sgd(role, folder), load_file(folder / "model.safetensors")
        found = [(name, tensor) for result in results for name, tensor in result[role].items()]
        assert {name for name, _ in found} == set(expected)
        errors[role] = max(largest(tensor - expected[name]) for name, tensor in found)
        # The steps are large enough to be compared.
        assert max(largest(expected[name] - start[name]) for name in expected) > 0.05
    record("sgd", json.dumps(errors))
    assert max(errors.values()) <= 1e-5, errors


def run(world: DistWorld, role: str, folder: Path, case: Case) -> list[RankResult]:
    return world.run(
        train_once,
        world_size=case.layout.model_size * len(case.deal),
        parallelism=case.layout,
        role=role,
        folder=str(folder),
        layout=case.layout,
        optim=case.optim,
        deal=case.deal,
    )


def check_parity(results: list[RankResult], expected: plain.PlainResult, role: str, case: Case, record: Record) -> None:
    experience = make_experience()
    numbers = scattered(results, experience.sequence_ids, experience.offsets)
    means = merged_means(results)
    gradients = [(name, tensor) for result in results for name, tensor in result.gradients.items()]
    weights = [(name, tensor) for result in results for name, tensor in result.weights.items()]
    wanted = expected.gradients
    errors = {
        "numbers": float(np.abs(numbers - expected.numbers.numpy()).max()),
        "loss": abs(means[f"{role}/loss/mean"] - expected.loss),
        "weights": max(largest(tensor - expected.weights[name]) for name, tensor in weights),
    }
    if gradients:  # which a distributed optimizer scatters
        errors["gradient"] = max(largest(tensor - wanted[name]) / largest(wanted[name]) for name, tensor in gradients)
    if role == "actor":
        errors["entropy"] = abs(means["forward actor/entropy/mean"] - expected.entropy)
    record("parity", json.dumps({name: float(error) for name, error in errors.items()}))
    limits = {"numbers": 1e-5, "loss": 1e-6, "gradient": 1e-5, "weights": 1e-5, "entropy": 1e-5}
    assert {name: error for name, error in errors.items() if not error <= limits[name]} == {}

    assert sum(result.numbers is not None for result in results) == len(case.deal)
    assert {name for name, _ in weights} == set(expected.weights)
    assert bool(gradients) is not case.optim.distributed
    assert means[f"{role}/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert expected.grad_norm > OPTIM.clip_grad  # so that clipping is part of the comparison


def merged_means(results: list[RankResult]) -> dict[str, float]:
    merged: dict[str, np.ndarray] = {}
    for result in results:
        for name, pair in result.metrics.items():
            merged[name] = merged.get(name, np.zeros(2)) + pair
    return {name: total / count for name, (total, count) in merged.items()}


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())
