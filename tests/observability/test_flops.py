"""FLOPs against hand-computed sizes and against the matmuls that torch really runs."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.llama import LlamaConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from megappo.config.lora import LoraConfig
from megappo.config.memory import RecomputeConfig, RecomputeGranularity, RecomputeMethod
from megappo.errors import DataError
from megappo.observability.device_peaks import DEVICE_PEAKS, MatmulFormat, peak_flops
from megappo.observability.flops import ModelFlops, PassSize, model_flops, pass_size

TOKENS = 7
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3, heads of another size": Qwen3Config(**SIZES, head_dim=10),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe, every second layer": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=5, decoder_sparse_step=2, mlp_only_layers=[]
    ),
    "qwen3_moe, layers named": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=5, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe, gated shared expert": Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=5, shared_expert_intermediate_size=9
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=6,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=11,
        kv_lora_rank=13,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=5,
    ),
    "deepseek_v3, whole queries": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        first_k_dense_replace=3,
        q_lora_rank=None,
        kv_lora_rank=13,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=5,
    ),
}


def counted(model: PreTrainedModel, *, backward: bool) -> int:
    """FLOPs of the matmuls that torch runs for one sequence, all positions predicted."""
    counter = FlopCounterMode(display=False)
    tokens = torch.arange(TOKENS).unsqueeze(0)
    with counter:
        logits = model(tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("deepseek")) for name in MODELS]
)
def test_flops_are_those_of_the_matmuls_that_torch_runs(name: str):
    config = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    flops = model_flops(config.to_dict())
    # The eager attention of transformers computes all pairs, then masks those that are not causal.
    size = PassSize(tokens=TOKENS, pairs=TOKENS * TOKENS, predictions=TOKENS)
    assert counted(model, backward=False) == flops.forward(size)
    assert counted(model, backward=True) == flops.forward(size) + flops.backward(size)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_model_of_no_experts_is_dense_whatever_else_is_said_of_them(count: str):
    assert model_flops(SIZES | EXPERTS | {count: 0}) == model_flops(SIZES)


def test_flops_of_a_dense_model_by_hand():
    flops = model_flops(SIZES)
    projections = 24 * 24 + 2 * (24 * 12) + 24 * 24  # queries, keys and values of half as many heads, output
    assert flops.per_token == 2 * 3 * (projections + 3 * 24 * 20)
    assert flops.per_pair == 2 * 3 * (24 + 24)  # score and value over 4 heads of 6
    assert flops.per_prediction == 2 * 24 * 40
    size = PassSize(tokens=5, pairs=15, predictions=2)
    assert flops.forward(size) == 5 * flops.per_token + 15 * flops.per_pair + 2 * flops.per_prediction
    assert flops.layers(size) == flops.forward(size) - 2 * flops.per_prediction
    assert (flops.backward(size), flops.training(size)) == (2 * flops.forward(size), 3 * flops.forward(size))


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (RecomputeConfig(), 0),
        (RecomputeConfig(granularity=RecomputeGranularity.full), 4 * 1000 + 6 * 10),
        (
            # 2 of the 3 layers of each of 2 stages
            RecomputeConfig(granularity=RecomputeGranularity.full, method=RecomputeMethod.block, num_layers=2),
            (4 * 1000 + 6 * 10) * 4 / 6,
        ),
        (RecomputeConfig(granularity=RecomputeGranularity.selective), 6 * 10),
        (RecomputeConfig(granularity=RecomputeGranularity.selective, modules=["mlp", "layernorm"]), 4 * 200),
        (RecomputeConfig(granularity=RecomputeGranularity.selective, modules=["moe", "core_attn"]), 4 * 700 + 60),
    ],
)
def test_recomputed_layers_are_work_of_the_hardware_only(recompute: RecomputeConfig, expected: float):
    flops = ModelFlops(num_layers=6, projections=100, dense=200, experts=700, per_pair=10, per_prediction=50)
    assert flops.recomputed(PassSize(tokens=4, pairs=6, predictions=3), recompute, chunks=2) == expected


@pytest.mark.parametrize("name", ["llama", "qwen3, heads of another size", "qwen3_moe, every second layer"])
@pytest.mark.parametrize("value_head", [False, True], ids=["policy", "critic"])
def test_frozen_weights_have_no_gradient_products(name: str, value_head: bool):
    config = deepcopy(MODELS[name])
    config.num_labels = 1
    targets = ["q_proj", "k_proj", "o_proj"] if "moe" in name else ["q_proj", "v_proj", "gate_proj", "down_proj"]
    lora = LoraConfig(rank=3, targets=targets)
    kind = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
    model = kind.from_config(config)
    model.requires_grad_(False)
    if value_head:
        model.score.requires_grad_()
    for module_name, module in list(model.named_modules()):
        if module_name.split(".")[-1] in targets:
            module.register_forward_hook(low_rank_hook(module, lora.rank))
    model.get_input_embeddings().register_forward_hook(lambda _module, _input, output: output.requires_grad_())
    flops = model_flops(config.to_dict(), value_head=value_head, lora=lora)
    counter = FlopCounterMode(display=False)
    with counter:
        hidden = model.model(torch.arange(TOKENS).unsqueeze(0), use_cache=False).last_hidden_state
        (model.score if value_head else model.lm_head)(hidden).sum().backward()
    size = PassSize(tokens=TOKENS, pairs=TOKENS * TOKENS, predictions=TOKENS)
    assert counter.get_total_flops() == flops.training(size)
    assert flops.training(size) < model_flops(config.to_dict(), value_head=value_head).training(size)


def low_rank_hook(module: torch.nn.Module, rank: int) -> Any:
    rows, columns = module.get_parameter("weight").shape
    down = torch.randn(rank, columns, requires_grad=True)
    up = torch.randn(rows, rank, requires_grad=True)
    linear = torch.nn.functional.linear
    return lambda _module, inputs, output: output + linear(linear(inputs[0], down), up)


def test_a_value_head_has_one_row():
    assert model_flops(SIZES, value_head=True).per_prediction == 2 * 24


def test_a_text_model_nested_in_another_is_found():
    assert model_flops({"model_type": "vision", "text_config": SIZES}) == model_flops(SIZES)


def test_pass_size_counts_inputs_and_pairs_of_each_sequence_alone():
    # 4 tokens are 3 inputs, which see 1 + 2 + 3 keys; 1 token is no input, as is none.
    assert pass_size([4, 1, 3, 0], predictions=5) == PassSize(tokens=3 + 2, pairs=6 + 3, predictions=5)


def test_pairs_of_long_sequences_do_not_overflow():
    assert pass_size([2**31 + 1], predictions=0).pairs == 2**31 * (2**31 + 1) // 2


def test_flops_of_llama_3_8b_match_its_parameters():
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    flops = model_flops(config)
    # 8,030,261,248 parameters; all are matmul weights but the embedding (128256 x 4096) and 65 norms of 4096.
    assert (flops.per_token + flops.per_prediction) // 2 == 8_030_261_248 - 128256 * 4096 - 65 * 4096


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size"])
def test_a_mixture_without_its_sizes_is_refused_by_name(key: str):
    config = SIZES | EXPERTS | {"num_experts": 5, key: "many"}
    with pytest.raises(DataError, match=key):
        model_flops(config)


def test_peaks_are_known_by_exact_name_and_format():
    assert peak_flops("NVIDIA H100 80GB HBM3", MatmulFormat.bfloat16) == pytest.approx(989.4e12)
    assert peak_flops("NVIDIA H100 PCIe", MatmulFormat.bfloat16) == pytest.approx(756e12)
    assert peak_flops("NVIDIA GB200", MatmulFormat.float8) == pytest.approx(5000e12)
    assert peak_flops("NVIDIA A100-SXM4-80GB", MatmulFormat.float8) is None
    for unknown in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", "", None):
        assert peak_flops(unknown, MatmulFormat.bfloat16) is None


def test_every_peak_has_a_source_and_names_of_its_own():
    names = [name for peak in DEVICE_PEAKS for name in peak.names]
    assert len(set(names)) == len(names)
    assert all(peak.source.startswith("NVIDIA ") for peak in DEVICE_PEAKS)
    # Each format halves the bits of the one before it and doubles the rate, to the rounding of the data sheets.
    for peak in DEVICE_PEAKS:
        assert peak.bfloat16 / peak.float32 == pytest.approx(2, rel=2e-3)
        assert peak.float8 is None or peak.float8 / peak.bfloat16 == pytest.approx(2, rel=2e-3)
