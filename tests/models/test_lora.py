"""Adapters on models: their start, their places, and what is exported. Training them is in tests/train/test_lora.py."""

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import load_file

from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype, ModelConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.errors import CapabilityError
from megappo.models import layer_specs
from megappo.models.architecture import read_architecture
from megappo.models.build import Head, build_model
from megappo.models.export import export_hf_state
from megappo.models.load import load_hf_weights
from megappo.models.lora import adapter_parameters
from tests.dist_world import DistWorld
from tests.models.conftest import MakeModel
from tests.models.model_jobs import call_packed

SEQUENCES = [[5, 7, 11, 13, 17], [2, 3, 5]]
RANK = 3
LORA = LoraConfig(rank=RANK, alpha=6.0)
HALF = LoraConfig(rank=RANK, alpha=6.0, targets=["k_proj", "gate_proj", "o_proj"])


def adapted_model(
    folder: str, lora: LoraConfig | None, *, dtype: Dtype = Dtype.float32, layout: ParallelismConfig | None = None
) -> Any:
    architecture = read_architecture(folder)
    (chunk,) = build_model(
        architecture,
        model=ModelConfig(dtype=dtype),
        parallelism=layout or ParallelismConfig(),
        head=Head.language_model,
        backend=CPU,
        lora=lora,
        seed=4,
    )
    load_hf_weights([chunk], architecture, folder)
    return chunk


def fresh_adapters(folder: str, layout: ParallelismConfig) -> dict[str, Any]:
    """Factors of this rank, hidden states and export of a model with and without fresh adapters."""
    plain, adapted = (adapted_model(folder, lora, layout=layout) for lora in (None, LORA))
    return {
        "factors": {name: parameter.detach() for parameter, name in adapter_parameters(adapted)},
        "trained": sum(parameter.requires_grad for parameter in adapted.parameters()),
        "same output": torch.equal(call_packed(plain, SEQUENCES), call_packed(adapted, SEQUENCES)),
        "export": export_hf_state([adapted]),
    }


@torch.no_grad()
def merged_in_16_bits(folder: str) -> list[dict[str, torch.Tensor]]:
    """Export before and after the factors are set, and the factors."""
    model = adapted_model(folder, HALF, dtype=Dtype.bfloat16)
    before = {name: tensor.clone() for name, tensor in export_hf_state([model]).items()}
    torch.manual_seed(1)
    for parameter, _ in adapter_parameters(model):
        parameter.normal_(std=0.1)
    factors = {name: parameter.detach().clone() for parameter, name in adapter_parameters(model)}
    return [before, export_hf_state([model]), factors]


def refusal(folder: str, targets: list[str]) -> str:
    with pytest.raises(CapabilityError) as caught:
        adapted_model(folder, LoraConfig(targets=targets))
    return str(caught.value)


@pytest.mark.parametrize(
    "layout", [ParallelismConfig(), ParallelismConfig(tensor=2, sequence=True)], ids=["one process", "tensor"]
)
def test_fresh_adapters_change_nothing_and_alone_want_gradients(
    world: DistWorld, make_model: MakeModel, layout: ParallelismConfig
) -> None:
    folder = make_model("qwen3")
    results = world.run(fresh_adapters, parallelism=layout, folder=str(folder), layout=layout)
    for found in results:
        assert found["same output"]
        assert len(found["factors"]) == found["trained"] == 4 * 7 * 2
    saved, exported = load_file(folder / "model.safetensors"), results[0]["export"]
    assert exported.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())


def test_every_layout_starts_from_the_same_adapters(world: DistWorld, make_model: MakeModel) -> None:
    folder = str(make_model("qwen3"))
    one, two = ParallelismConfig(), ParallelismConfig(tensor=2)
    (whole,) = world.run(fresh_adapters, parallelism=one, folder=folder, layout=one)
    first, second = world.run(fresh_adapters, parallelism=two, folder=folder, layout=two)
    names = whole["factors"].keys()
    assert names == first["factors"].keys()
    for name in names:
        parts = first["factors"][name], second["factors"][name]
        is_row = "o_proj" in name or "down_proj" in name
        if "lora_A" in name:
            assert torch.equal(torch.cat(parts, 1) if is_row else parts[0], whole["factors"][name])
            assert is_row or torch.equal(*parts)
            bound = whole["factors"][name].shape[1] ** -0.5
            assert 0.8 * bound < float(whole["factors"][name].abs().max()) <= bound
        else:
            assert all(part.count_nonzero() == 0 for part in parts)
            assert len(whole["factors"][name]) == (1 if is_row else 2) * len(parts[0])
    starts = [tensor for name, tensor in whole["factors"].items() if "lora_A" in name]
    assert len({tensor.sum().item() for tensor in starts}) == len(starts)


def test_what_is_exported_in_16_bits_is_the_rounded_sum(world: DistWorld, make_model: MakeModel) -> None:
    before, after, factors = world.run(
        merged_in_16_bits, parallelism=ParallelismConfig(), folder=str(make_model("qwen2"))
    )[0]
    adapted = {f"{name.removesuffix('.lora_A.weight')}.weight" for name in factors if "lora_A" in name}
    assert {name.split(".")[-2] for name in adapted} == set(HALF.targets)
    for name, tensor in after.items():
        if name not in adapted:
            assert torch.equal(tensor, before[name])
            continue
        module = name.removesuffix("weight")
        down, up = (factors[f"{module}lora_{factor}.weight"].double() for factor in "AB")
        exact = before[name].double() + 2.0 * up @ down
        assert tensor.dtype is torch.bfloat16
        # Half a unit in the last of 8 bits, and what fp32 sums add to it.
        assert bool(((tensor.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())
        assert not torch.equal(tensor, before[name])


def test_matrices_of_experts_are_refused(world: DistWorld, make_model: MakeModel) -> None:
    folder = str(make_model("qwen3_moe"))
    (message,) = world.run(refusal, parallelism=ParallelismConfig(), folder=folder, targets=["q_proj", "up_proj"])
    assert message == (
        "lora.targets=up_proj is for dense models: the experts of this one take no adapters "
        "(use lora.targets=[q_proj,k_proj,v_proj,o_proj])"
    )


def test_layers_of_transformer_engine_get_their_norms_outside() -> None:
    """Its classes cannot be made here; which of them a layer names can be looked at."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer_specs._separate_norms(layer)
    submodules: Any = layer.submodules
    assert submodules.input_layernorm is TENorm and submodules.pre_mlp_layernorm is TENorm
    assert submodules.self_attention.submodules.linear_qkv is TEColumnParallelLinear
    assert layer_specs._mlp_submodules(submodules).linear_fc1 is TEColumnParallelLinear
    of_experts: Any = get_gpt_layer_local_spec(num_experts=2, normalization="RMSNorm")
    experts = of_experts.submodules.mlp
    layer_specs._separate_norms(of_experts)
    assert of_experts.submodules.mlp is experts and of_experts.submodules.pre_mlp_layernorm is TENorm
