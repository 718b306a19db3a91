"""Names of parameters and of Hugging Face tensors."""

import pytest

from megappo.errors import CheckpointError
from megappo.weights.name_map import (
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    NameTable,
    Partition,
    Transform,
    global_name,
    hugging_face_names,
    map_parameter,
    name_of_expert,
)


def test_a_layer_of_a_chunk_is_named_by_its_global_index() -> None:
    assert global_name("decoder.layers.1.mlp.linear_fc2.weight", 5) == "decoder.layers.6.mlp.linear_fc2.weight"
    assert global_name("decoder.layers.10.mlp.linear_fc2.weight", 0) == "decoder.layers.10.mlp.linear_fc2.weight"
    assert global_name("output_layer.weight", 5) == "output_layer.weight"


def test_fused_parameters_name_their_tensors_in_merge_order() -> None:
    mapped = map_parameter(QWEN2, "decoder.layers.12.self_attention.linear_qkv.bias")
    assert mapped.hugging_face == [f"model.layers.12.self_attn.{name}_proj.bias" for name in "qkv"]
    assert (mapped.transform, mapped.partition) == (Transform.qkv, Partition.column)
    mapped = map_parameter(LLAMA, "decoder.layers.0.mlp.linear_fc1.weight")
    assert mapped.hugging_face == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    assert mapped.transform is Transform.gate_up


def test_an_expert_of_a_rank_is_named_by_its_global_index() -> None:
    local = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    grouped = "decoder.layers.1.mlp.experts.linear_fc2.weight3"
    assert global_name(local, 4, 8) == "decoder.layers.5.mlp.experts.local_experts.11.linear_fc1.weight"
    assert global_name(grouped, 4, 8) == "decoder.layers.5.mlp.experts.linear_fc2.weight11"
    assert name_of_expert(grouped, 20) == "decoder.layers.1.mlp.experts.linear_fc2.weight20"
    assert global_name("decoder.layers.1.mlp.linear_fc1.weight", 4, 8) == "decoder.layers.5.mlp.linear_fc1.weight"


def test_experts_have_names_of_their_own_in_each_family() -> None:
    name = "decoder.layers.7.mlp.experts.local_experts.12.linear_fc1.weight"
    mapped = map_parameter(QWEN3_MOE, name)
    assert mapped.hugging_face == [f"model.layers.7.mlp.experts.12.{part}_proj.weight" for part in ("gate", "up")]
    assert (mapped.expert, mapped.transform, mapped.partition) == (12, Transform.gate_up, Partition.column)
    mapped = map_parameter(MIXTRAL, name)
    assert mapped.hugging_face == [f"model.layers.7.block_sparse_moe.experts.12.{part}.weight" for part in ("w1", "w3")]
    router = map_parameter(MIXTRAL, "decoder.layers.7.mlp.router.weight")
    assert router.hugging_face == ["model.layers.7.block_sparse_moe.gate.weight"] and router.expert is None
    assert map_parameter(QWEN3_MOE, "decoder.layers.7.mlp.linear_fc2.weight").expert is None


def test_both_layer_specs_have_the_same_table() -> None:
    for local, fused in [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.experts.local_experts.5.linear_fc1.weight", "mlp.experts.linear_fc1.weight5"),
        ("mlp.experts.local_experts.5.linear_fc2.weight", "mlp.experts.linear_fc2.weight5"),
    ]:
        first, second = (map_parameter(QWEN3_MOE, f"decoder.layers.3.{name}") for name in (local, fused))
        assert first == second and first.megatron != second.megatron


@pytest.mark.parametrize("name", ["decoder.layers.0.self_attention.linear_qkv.bias", "decoder.layers.0.adapter.weight"])
def test_a_parameter_without_a_rule_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        map_parameter(LLAMA, name)


@pytest.mark.parametrize(("table", "per_layer"), [(LLAMA, 9), (QWEN2, 12), (QWEN3, 11)])
def test_a_table_names_every_tensor_of_every_layer_once(table: NameTable, per_layer: int) -> None:
    # Embedding, final norm, output layer and value head are outside the layers.
    assert len(hugging_face_names(table, 5)) == 5 * per_layer + 4
    names = [name for rule in table.rules for name in rule.hugging_face]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("table", "shared", "dense"), [(QWEN3_MOE, 8, 3), (MIXTRAL, 6, 0)])
def test_a_table_of_experts_names_those_of_every_sparse_layer(table: NameTable, shared: int, dense: int) -> None:
    names = hugging_face_names(table, 5, num_experts=7, dense_layers=[1, 4])
    assert len(names) == 5 * shared + 2 * dense + 3 * (7 * 3 + 1) + 4
    assert not any(f"layers.{layer}." in name and "experts" in name for name in names for layer in (1, 4))
