"""Trainers with adapters in every layout against the same mathematics written plainly (tests/train/plain_lora.py).

Tolerances as in test_parity.py: fp32 sums in another order. Log-probs and values 1e-5, loss 1e-6, gradients 1e-5 of the
largest entry of their tensor, adapters after three steps 1e-5; merged weights 1e-6 of a merge in double precision.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.config.lora import ATTENTION_TARGETS, LoraConfig
from megappo.config.memory import OffloadConfig, RecomputeConfig, RecomputeGranularity
from megappo.config.optim import OptimConfig, OptimizerName
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train import plain_lora
from tests.train.batches import MicroBatches, make_experience
from tests.train.conftest import save_policy
from tests.train.jobs import scattered
from tests.train.lora_jobs import (
    AdapterResult,
    offload_adapters,
    part_of,
    recomputed_gradients,
    resume_adapters,
    switch_off_and_fail,
    train_adapters,
)
from tests.train.test_parity import SPLIT, UNEVEN, WHOLE, merged_means

STEPS = 3
OPTIM = OptimConfig(name=OptimizerName.sgd, lr=0.3, weight_decay=0.1, clip_grad=0.2)
ALL = LoraConfig(rank=3, alpha=4.0)
SOME = LoraConfig(rank=2, alpha=3.0, targets=["q_proj", "v_proj", "up_proj"])
ATTENTION = LoraConfig(rank=2, alpha=2.0, targets=list(ATTENTION_TARGETS))
ADAM = OptimConfig(lr=1e-2, weight_decay=0.1)
DISTRIBUTED = OptimConfig(
    lr=1e-2, weight_decay=0.1, distributed=True, overlap_grad_reduce=True, overlap_param_gather=True
)

Record = Callable[[str, object], None]


@dataclass(kw_only=True)
class Case:
    """One row of the table."""

    role: str
    layout: ParallelismConfig
    deal: list[MicroBatches]
    lora: LoraConfig


def row(
    name: str,
    *,
    role: str = "actor",
    deal: list[MicroBatches] = SPLIT,
    lora: LoraConfig = ALL,
    slow: bool = False,
    **axes: int | bool,
) -> Any:  # Any: pytest's parameter set
    case = Case(role=role, layout=ParallelismConfig(**axes), deal=deal, lora=lora)
    return pytest.param(case, id=name, marks=[pytest.mark.slow] if slow else [])


LAYOUTS = [
    row("one process", deal=WHOLE),
    row("one process, some matrices", lora=SOME),
    row("tensor", tensor=2),
    row("tensor and sequence", tensor=2, sequence=True, slow=True),  # as a critic's, below
    row("tensor and sequence, some matrices", tensor=2, sequence=True, lora=SOME, slow=True),
    row("data", deal=UNEVEN),
    row("pipeline", pipeline=2),
    row("context", context=2, slow=True),
    row("tensor, sequence, virtual pipeline", tensor=2, pipeline=2, virtual_pipeline=2, sequence=True, slow=True),
    row("critic, tensor and sequence", role="critic", tensor=2, sequence=True),
    row("critic, pipeline", role="critic", pipeline=2, slow=True),
]


@cache
def factors(folder: Path, rank: int, *targets: str) -> plain_lora.Tensors:
    return plain_lora.random_adapters(folder, LoraConfig(rank=rank, targets=list(targets)))


def factors_of(folder: Path, lora: LoraConfig) -> plain_lora.Tensors:
    return factors(folder, lora.rank, *lora.targets)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_trains_adapters_as_plain_code_does(
    world: DistWorld, policy_folder: Path, critic_folder: Path, case: Case, record_property: Record
) -> None:
    folder = policy_folder if case.role == "actor" else critic_folder
    check(world, folder, policy_folder, case, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        row("expert", expert=2, deal=UNEVEN, lora=ATTENTION),
        row("whole experts on tensor ranks", tensor=2, sequence=True, lora=ATTENTION),
    ],
)
def test_attention_beside_experts_takes_adapters(
    world: DistWorld, expert_policy_folder: Path, case: Case, record_property: Record
) -> None:
    check(world, expert_policy_folder, expert_policy_folder, case, record_property)


def check(world: DistWorld, folder: Path, policy: Path, case: Case, record: Record) -> None:
    """Compare a layout with the plain code; the names of the matrices are those of a policy."""
    experience, lora = make_experience(), case.lora
    start = factors_of(policy, lora)
    expected = plain_lora.train(case.role, folder, start, experience, lora, OPTIM, steps=STEPS)
    results = world.run(
        train_adapters,
        world_size=case.layout.model_size * len(case.deal),
        parallelism=case.layout,
        role=case.role,
        folder=str(folder),
        layout=case.layout,
        optim=OPTIM,
        deal=case.deal,
        lora=lora,
        factors=start,
        steps=STEPS,
    )
    numbers = scattered(results, experience.sequence_ids, experience.offsets)
    means = merged_means(results)
    errors = {
        "numbers": float(np.abs(numbers - expected.numbers.numpy()).max()),
        "loss": abs(means[f"{case.role}/loss/mean"] - expected.losses[0]),
        "gradient": max(relative_errors(results, "gradients", expected.gradient)),
        "adapters": max(relative_errors(results, "weights", expected.trained, relative=False)),
        "merged": max(
            float((tensor - expected.merged[name]).abs().max())
            for result in results
            for name, tensor in result.merged.items()
        ),
        "merge": max(merge_errors(results, expected, lora)),
    }
    record("parity", json.dumps(errors))
    limits = {"numbers": 1e-5, "loss": 1e-6, "gradient": 1e-5, "adapters": 1e-5, "merged": 1e-5, "merge": 1e-6}
    assert {name: error for name, error in errors.items() if not error <= limits[name]} == {}
    assert means[f"{case.role}/grad_norm"] == pytest.approx(expected.norms[0], rel=1e-5)
    assert expected.norms[0] > OPTIM.clip_grad
    assert {name for result in results for name in result.weights} == set(expected.trained)
    check_frozen(results, case)


def relative_errors(
    results: list[AdapterResult], kind: str, expected: plain_lora.Tensors, *, relative: bool = True
) -> list[float]:
    """Errors of the parts that ranks have; so replicas are compared, too."""
    errors = []
    for result in results:
        for name, tensor in getattr(result, kind).items():
            wanted = part_of(expected[name], tensor.shape, result.tensor_rank)
            error = float((tensor - wanted).abs().max())
            errors.append(error / float(expected[name].abs().max()) if relative else error)
    return errors


def merge_errors(results: list[AdapterResult], expected: plain_lora.PlainAdapters, lora: LoraConfig) -> list[float]:
    """Errors of the export against a merge in double precision of what the ranks themselves ended with."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for result in results:
        for name, tensor in result.weights.items():
            parts.setdefault(name, {})[result.tensor_rank] = tensor
    whole = {}
    for name, by_rank in parts.items():
        tensors = [by_rank[rank] for rank in sorted(by_rank)]
        cut = [dim for dim in (0, 1) if tensors[0].shape[dim] != expected.trained[name].shape[dim]]
        whole[name] = torch.cat(tensors, cut[0]) if cut else tensors[0]
    frozen = {name: tensor for result in results for name, tensor in result.frozen.items()}
    merged = plain_lora.merged(frozen, whole, lora)
    return [float((tensor - merged[name]).abs().max()) for result in results for name, tensor in result.merged.items()]


def check_frozen(results: list[AdapterResult], case: Case) -> None:
    """Frozen weights did not move, the reference is them, and gradient buffers hold what is trained and no more."""
    for result in results:
        trained = sum(tensor.numel() for tensor in result.weights.values())
        assert trained <= result.gradient_elements < trained + 128 * len(result.weights)  # Megatron pads
        if result.without is not None:
            before, after = result.reference
            np.testing.assert_array_equal(before, result.without)
            np.testing.assert_array_equal(after, result.without)
            if case.role == "actor":
                assert np.abs(result.numbers.values - before).max() > 1e-2


def test_a_failing_pass_of_the_reference_leaves_the_adapters_on(world: DistWorld, policy_folder: Path) -> None:
    start = factors_of(policy_folder, ALL)
    found = world.run(
        switch_off_and_fail, parallelism=ParallelismConfig(), folder=str(policy_folder), lora=ALL, factors=start
    )[0]
    assert "micro-batches name" in found["error"]
    np.testing.assert_array_equal(found["before"], found["after"])
    assert np.abs(found["before"] - found["reference"]).max() > 1e-2


def test_recomputed_layers_give_their_adapters_gradients(world: DistWorld, policy_folder: Path) -> None:
    """Recomputation drops gradients where no input wants one, and the embedding is frozen. MLP adapters only: nothing
    trained stands before the first recomputed MLP."""
    lora = LoraConfig(rank=2, targets=["gate_proj", "down_proj"])
    full = RecomputeConfig(granularity=RecomputeGranularity.full)
    mlp = RecomputeConfig(granularity=RecomputeGranularity.selective, modules=["mlp"])
    kept, *others = world.run(
        recomputed_gradients,
        parallelism=ParallelismConfig(),
        folder=str(policy_folder),
        lora=lora,
        factors=factors_of(policy_folder, lora),
        settings=[RecomputeConfig(), full, mlp],
    )[0]
    for other in others:
        # Sums of gradients are made in another order.
        errors = {name: float((tensor - other[name]).abs().max() / tensor.abs().max()) for name, tensor in kept.items()}
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("layout", "data", "optim"),
    [
        (ParallelismConfig(tensor=2, sequence=True), 1, ADAM),
        pytest.param(ParallelismConfig(), 2, DISTRIBUTED, marks=pytest.mark.slow),
    ],
    ids=["tensor and sequence", "distributed, overlapped"],
)
def test_a_checkpoint_holds_adapters_only_and_fits_no_other_model(
    world: DistWorld, policy_folder: Path, tmp_path: Path, layout: ParallelismConfig, data: int, optim: OptimConfig
) -> None:
    other = save_policy(tmp_path / "other", seed=1)
    for found in world.run(
        resume_adapters,
        world_size=layout.model_size * data,
        parallelism=layout,
        folder=str(policy_folder),
        other=str(other),
        layout=layout,
        optim=optim,
        lora=ALL,
        checkpoint=str(tmp_path / "checkpoint"),
    ):
        assert found["same state"]
        assert found["saved"] == found["adapters"] != []
        rank, none, base = found["messages"]
        assert "'rank': 3" in rank and "'rank': 4" in rank
        assert "{'lora': None}" in none
        assert "adapters of another model: the frozen weights differ" in base


@pytest.mark.parametrize(
    ("layout", "data", "optim"),
    [
        (ParallelismConfig(), 1, ADAM),
        pytest.param(ParallelismConfig(), 2, DISTRIBUTED, marks=pytest.mark.slow),
    ],
    ids=["one process", "distributed, overlapped"],
)
def test_adapters_and_frozen_weights_leave_memory_and_come_back(
    world: DistWorld, policy_folder: Path, layout: ParallelismConfig, data: int, optim: OptimConfig
) -> None:
    everything = OffloadConfig(params=True, grads=True, optimizer=True)
    for kept, moved in world.run(
        offload_adapters,
        world_size=layout.model_size * data,
        parallelism=layout,
        folder=str(policy_folder),
        layout=layout,
        optim=optim,
        lora=ALL,
        settings=[OffloadConfig(), everything],
    ):
        assert moved["found"] == kept["found"]
        assert moved["out"] == {"params": True, "grads": True, "moments": True}
        assert kept["out"] == {"params": False, "grads": False, "moments": False}
