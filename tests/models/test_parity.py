"""Megatron's models compute what transformers' do, in every layout.

Tolerances: float32 sums of up to a few hundred terms in another order, on logits of order 1 (values reach 10);
gradients relative to the largest of their tensor.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megappo.config.parallelism import ParallelismConfig
from megappo.models.build import Head
from megappo.models.families import FAMILIES
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel
from tests.models.expert_layouts import EXPERT_CASES
from tests.models.model_jobs import (
    RankResult,
    Sequences,
    forward_backward,
    forward_backward_of_all,
    language_model_loss,
    value_loss,
)

LAYOUTS = {
    "tensor": ParallelismConfig(tensor=2),
    "tensor and sequence": ParallelismConfig(tensor=2, sequence=True),
    "pipeline": ParallelismConfig(pipeline=2),
    "virtual pipeline": ParallelismConfig(pipeline=2, virtual_pipeline=2),
    "tensor, sequence and pipeline": ParallelismConfig(tensor=2, pipeline=2, sequence=True),
}
ALL = LAYOUTS["tensor, sequence and pipeline"]
ONE = ParallelismConfig()
OF_BOTH_ENDS = [
    pytest.param(layout, id=name, marks=[] if layout in (ALL, LAYOUTS["virtual pipeline"]) else [pytest.mark.slow])
    for name, layout in {"one process": ONE, **LAYOUTS}.items()
]
"""For what differs at the first and the last layer only; tests/train/test_parity.py tries it on more layouts."""


def make_batch(lengths: list[int], seed: int) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


# Each micro-batch has 64 tokens, as virtual stages want; the lengths make several buckets.
MICRO_BATCHES = [make_batch([40, 3, 5, 1, 15], 1), make_batch([32, 32], 2)]
FOUR = [*MICRO_BATCHES, make_batch([10, 54], 4), make_batch([64], 5)]
UNEQUAL = [make_batch(lengths, 3) for lengths in ([40, 2], [8], [7, 31], [50], [2], [20, 20])]

Expected = tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]


_POLICIES: dict[str, Expected] = {}


def policy_of_transformers(folder: Path, micro_batches: list[Sequences]) -> Expected:
    """Per micro-batch logits [T, vocab]; loss and gradients. One sequence at a time; computed once per test session."""
    key = f"{folder}{micro_batches}"
    if key not in _POLICIES:
        _POLICIES[key] = compute_with_transformers(folder, micro_batches)
    return _POLICIES[key]


def compute_with_transformers(folder: Path, micro_batches: list[Sequences]) -> Expected:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = [
        torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences]) for sequences in micro_batches
    ]
    loss = torch.stack([language_model_loss(*pair) for pair in zip(logits, micro_batches)]).sum()
    loss.backward()
    return [part.detach() for part in logits], float(loss), gradients_of(model)


def critic_of_transformers(folder: Path, micro_batches: list[Sequences]) -> Expected:
    """The same for values [T]: the last hidden states times the value head of the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    head = load_file(folder / "model.safetensors")["score.weight"].requires_grad_()
    values = []
    for sequences in micro_batches:
        hidden = [model(torch.tensor([sequence])).last_hidden_state[0] for sequence in sequences]
        values.append(torch.cat(hidden) @ head[0])
    loss = torch.stack([value_loss(*pair) for pair in zip(values, micro_batches)]).sum()
    loss.backward()
    gradients = {f"model.{name}": gradient for name, gradient in gradients_of(model).items()}
    assert head.grad is not None
    return [part.detach() for part in values], float(loss), gradients | {"score.weight": head.grad}


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the gradients under the names of the tensors in a model folder (experts are fused in memory)."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def assert_same(expected: Expected, results: list[RankResult]) -> None:
    outputs, loss, gradients = expected
    last = [result for result in results if result.outputs is not None]
    assert set().union(*(result.outputs or {} for result in last)) == set(range(len(outputs)))
    for result in last:
        for number, mine in (result.outputs or {}).items():
            torch.testing.assert_close(mine, outputs[number], rtol=2e-6, atol=1e-5)
        assert result.loss == pytest.approx(loss, rel=1e-6)
    assert set().union(*(result.gradients for result in results)) == set(gradients)
    for result in results:
        for name, gradient in result.gradients.items():
            error = float((gradient - gradients[name]).abs().max() / gradients[name].abs().max())
            assert error < 1e-5, f"{name}: {error}"


def run(
    world: DistWorld,
    folder: Path,
    layout: ParallelismConfig,
    head: Head,
    batches: list[Sequences],
    world_size: int | None = None,
) -> list[RankResult]:
    return world.run(
        forward_backward,
        world_size=world_size,
        parallelism=layout,
        layout=layout,
        folder=str(folder),
        head=head,
        micro_batches=batches,
    )


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Frequencies that the scaling changes within the lengths of the test.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES.names()},
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e2, "original_max_position_embeddings": 32}}),
    "linear positions": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e2, "factor": 3.0}}),
    "yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e2,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "odd vocabulary": ("llama", {"vocab_size": 97}),
    "odd tied vocabulary": ("llama", {"vocab_size": 97, "tie_word_embeddings": True}),
    "tied experts": ("mixtral", {"tie_word_embeddings": True}),
    "plain probabilities": ("qwen3_moe", {"norm_topk_prob": False}),
    "one expert per token": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "every second layer sparse": ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
    "no layer sparse": ("qwen3_moe", {"num_experts": 0}),
}


@pytest.mark.parametrize("layout", [ONE, ALL], ids=["one process", "all axes"])
def test_every_kind_of_model_computes_what_transformers_does(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig
) -> None:
    folders = [make_model(family, **changes) for family, changes in KINDS.values()]
    results = world.run(
        forward_backward_of_all,
        parallelism=layout,
        layout=layout,
        folders=list(map(str, folders)),
        micro_batches=MICRO_BATCHES,
    )
    for kind, folder, *of_ranks in zip(KINDS, folders, *results, strict=True):
        try:
            assert_same(policy_of_transformers(folder, MICRO_BATCHES), of_ranks)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error


@pytest.mark.parametrize(("layout", "world_size"), EXPERT_CASES)
def test_every_layout_of_experts_computes_what_transformers_does(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig, world_size: int
) -> None:
    folder = make_model("qwen3_moe")
    results = run(world, folder, layout, Head.language_model, FOUR, world_size)
    assert_same(policy_of_transformers(folder, FOUR), results)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_computes_what_transformers_does(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig
) -> None:
    folder = make_model("qwen2")
    results = run(world, folder, layout, Head.language_model, MICRO_BATCHES)
    assert_same(policy_of_transformers(folder, MICRO_BATCHES), results)


@pytest.mark.parametrize("layout", OF_BOTH_ENDS)
def test_a_tied_output_layer_adds_its_gradient_to_the_embedding(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig
) -> None:
    folder = make_model("llama", tie_word_embeddings=True)
    results = run(world, folder, layout, Head.language_model, MICRO_BATCHES)
    assert_same(policy_of_transformers(folder, MICRO_BATCHES), results)


def test_pipeline_micro_batches_may_differ_in_tokens(world: DistWorld, make_model: MakeModel) -> None:
    folder = make_model("qwen2")
    results = run(world, folder, ALL, Head.language_model, UNEQUAL)
    assert_same(policy_of_transformers(folder, UNEQUAL), results)


def test_interleaved_stages_exchange_the_right_activations(world: DistWorld, make_model: MakeModel) -> None:
    """With Megatron's default exchange over gloo they do not, once there are enough micro-batches for both directions
    to be under way at a time (models/build.py)."""
    folder = make_model("qwen2")
    batches = [make_batch([32, 32], seed) for seed in range(8)]
    results = run(world, folder, LAYOUTS["virtual pipeline"], Head.language_model, batches)
    assert_same(policy_of_transformers(folder, batches), results)


@pytest.fixture(scope="module")
def critic_folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A critic as it is saved: a value head and no output layer."""
    policy = make_model("qwen3")
    folder = tmp_path_factory.mktemp("critic")
    tensors = load_file(policy / "model.safetensors")
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    tensors["score.weight"] = torch.randn(1, 32, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((policy / "config.json").read_text())
    return folder


@pytest.mark.parametrize("layout", OF_BOTH_ENDS)
def test_the_value_head_computes_what_a_linear_layer_on_transformers_does(
    world: DistWorld, critic_folder: Path, layout: ParallelismConfig
) -> None:
    results = run(world, critic_folder, layout, Head.value_function, MICRO_BATCHES)
    assert_same(critic_of_transformers(critic_folder, MICRO_BATCHES), results)


def test_a_value_head_on_a_policys_folder_starts_at_zero(world: DistWorld, make_model: MakeModel) -> None:
    folder = make_model("qwen2", tie_word_embeddings=True)
    (result,) = run(world, folder, ONE, Head.value_function, MICRO_BATCHES)
    assert result.outputs is not None and all(bool((values == 0).all()) for values in result.outputs.values())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
