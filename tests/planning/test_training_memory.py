"""Bytes of weights, gradients and optimizer state, each against models that Megatron built."""

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.cli.check_model import planned_model
from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, OptimizerName
from megappo.config.parallelism import ParallelismConfig
from megappo.models.architecture import read_architecture
from megappo.models.families import FAMILIES
from megappo.planning.training_memory import TrainedModel, memory_of_ranks
from tests.dist_world import DistWorld
from tests.planning.planning_jobs import Built, bytes_held

# No size is a multiple of 64, so that every padding shows; a vocabulary that two ranks do not divide.
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 22,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
DENSE = [family for family in FAMILIES.names() if family not in EXPERTS]

ADAM = OptimConfig()
DISTRIBUTED = OptimConfig(distributed=True)
# Small buckets, so that there are several and their padding counts.
BUCKETS = OptimConfig(distributed=True, overlap_grad_reduce=True, overlap_param_gather=True, overlap_bucket_params=3000)
SGD = OptimConfig(name=OptimizerName.sgd, momentum=0.9)
PLAIN_SGD = OptimConfig(name=OptimizerName.sgd)
LORA = LoraConfig(rank=3, targets=["q_proj", "o_proj", "v_proj"])
WHOLE_LORA = LoraConfig(rank=3)

# Options of a trained model: changes of config.json, precision, optimizer, adapters, critic.
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 distributed": {"optim": DISTRIBUTED},
    "bf16": {"dtype": Dtype.bfloat16},
    "bf16 distributed": {"dtype": Dtype.bfloat16, "optim": DISTRIBUTED},
    "bf16 buckets": {"dtype": Dtype.bfloat16, "optim": BUCKETS},
    "tied": {"tied": True},
    "tied bf16 distributed": {"tied": True, "dtype": Dtype.bfloat16, "optim": DISTRIBUTED},
    "tied bf16 buckets": {"tied": True, "dtype": Dtype.bfloat16, "optim": BUCKETS},
    "sgd": {"dtype": Dtype.bfloat16, "optim": SGD},
    "sgd without momentum": {"optim": PLAIN_SGD},
    "lora": {"lora": LORA, "dtype": Dtype.bfloat16},
    "lora distributed": {"lora": LORA, "dtype": Dtype.bfloat16, "optim": DISTRIBUTED, "tied": True},
    "critic": {"is_critic": True, "dtype": Dtype.bfloat16, "optim": DISTRIBUTED},
    "critic of a tied model": {"is_critic": True, "tied": True},
    "critic with lora": {"is_critic": True, "lora": LORA, "dtype": Dtype.bfloat16, "optim": DISTRIBUTED},
}

# Layout and number of processes.
DENSE_LAYOUTS = {
    "one": (ParallelismConfig(), 1),
    "data": (ParallelismConfig(), 4),
    "tensor": (ParallelismConfig(tensor=2), 4),
    "sequence": (ParallelismConfig(tensor=2, sequence=True), 2),
    "pipeline": (ParallelismConfig(pipeline=2), 4),
    "tensor and pipeline": (ParallelismConfig(tensor=2, pipeline=2, sequence=True), 4),
    "virtual pipeline": (ParallelismConfig(pipeline=2, virtual_pipeline=2), 4),
    "uneven pipeline": (ParallelismConfig(pipeline=2, first_stage_layers=3), 2),
    "context": (ParallelismConfig(context=2), 4),
}
EXPERT_LAYOUTS = {
    "one": (ParallelismConfig(), 1),
    "expert": (ParallelismConfig(expert=2), 4),
    "tensor and expert": (ParallelismConfig(tensor=2, sequence=True, expert=2), 2),
    "all expert axes": (ParallelismConfig(tensor=2, sequence=True, expert=2, expert_tensor=2), 4),
    "expert and pipeline": (ParallelismConfig(pipeline=2, expert=2), 4),
    "expert tensor": (ParallelismConfig(expert_tensor=2), 4),
}


def _cases(folder: Path, family: str, layout: ParallelismConfig, options: list[str]) -> list[Built]:
    cases: list[Built] = []
    for name in options:
        chosen = dict(OPTIONS[name])
        content = SHAPE | EXPERTS.get(family, {}) | {"model_type": family}
        content["tie_word_embeddings"] = chosen.pop("tied", False)
        place = folder / f"{family}-{content['tie_word_embeddings']}"
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(content))
        chosen.setdefault("optim", ADAM)
        cases.append(Built(folder=str(place), layout=layout, **chosen))
    return cases


def _check(world: DistWorld, cases: list[Built], layout: ParallelismConfig, size: int) -> None:
    by_rank = world.run(bytes_held, world_size=size, parallelism=layout, cases=cases)
    for index, case in enumerate(cases):
        model = planned_model(read_architecture(case.folder), has_value_head=case.is_critic)
        planned = memory_of_ranks(
            TrainedModel(model=model, layout=layout, devices=size, dtype=case.dtype, optim=case.optim, lora=case.lora)
        )
        for rank, memory in enumerate(planned):
            keeps_copy = not case.is_critic and case.lora is None
            found = {name: getattr(memory, name) for name in by_rank[rank][index] if name != "reference"}
            found["reference"] = memory.plain_weights if keeps_copy else 0
            assert found == by_rank[rank][index], (case, rank)


def test_bytes_of_every_family_are_those_of_built_models(world: DistWorld, tmp_path: Path) -> None:
    layout = ParallelismConfig(tensor=2, sequence=True)
    options = ["fp32", "tied bf16 buckets", "lora distributed", "critic"]
    cases = [case for family in FAMILIES.names() for case in _cases(tmp_path, family, layout, options)]
    _check(world, cases, layout, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "families"), [(name, DENSE) for name in DENSE_LAYOUTS] + [(name, [*EXPERTS]) for name in EXPERT_LAYOUTS]
)
def test_bytes_are_exact_under_every_layout(world: DistWorld, tmp_path: Path, name: str, families: list[str]) -> None:
    """Every option under every layout, the families in turn: each meets a third or a half of the options in each."""
    layout, size = (EXPERT_LAYOUTS if families != DENSE else DENSE_LAYOUTS)[name]
    turn = len(name)
    cases: list[Built] = []
    for index, option in enumerate(OPTIONS):
        cases += _cases(tmp_path, families[(index + turn) % len(families)], layout, [option])
    _check(world, cases, layout, size)


@pytest.mark.slow
def test_bytes_of_adapters_on_all_matrices_are_exact(world: DistWorld, tmp_path: Path) -> None:
    for name in ("sequence", "tensor and pipeline"):
        layout, size = DENSE_LAYOUTS[name]
        cases = _cases(tmp_path, "qwen2", layout, ["lora", "lora distributed"])
        for case in cases:
            case.lora = WHOLE_LORA
        _check(world, cases, layout, size)
