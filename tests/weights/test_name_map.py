"""Names of parameters and of Hugging Face tensors."""

import pytest

from megappo.errors import CheckpointError
from megappo.weights.name_map import (
    LLAMA,
    QWEN2,
    QWEN3,
    NameTable,
    Partition,
    Transform,
    global_name,
    hugging_face_names,
    map_parameter,
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


def test_both_layer_specs_have_the_same_table() -> None:
    for local, fused in [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ]:
        first, second = (map_parameter(QWEN3, f"decoder.layers.3.{name}") for name in (local, fused))
        assert first == second and first.partition is Partition.replicated


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
