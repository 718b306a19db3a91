"""What is read from config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.errors import CapabilityError, CheckpointError
from megappo.models.architecture import ExpertArchitecture, ModelArchitecture, read_architecture
from megappo.models.rope import Rope

# As transformers 4 writes it (Qwen2.5-0.5B).
QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "hidden_act": "silu",
}


def read(folder: Path, config: dict[str, Any]) -> ModelArchitecture:
    (folder / "config.json").write_text(json.dumps(config))
    return read_architecture(folder)


def test_every_size_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN) == ModelArchitecture(
        family="qwen2",
        num_layers=24,
        hidden_size=896,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        ffn_hidden_size=4864,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope=Rope(theta=1e6),
        rms_norm_eps=1e-6,
        qkv_bias=True,
        qk_norm=False,
        tied_embeddings=True,
    )


def test_families_differ_in_bias_and_norm(tmp_path: Path) -> None:
    llama, qwen3 = (read(tmp_path, QWEN | {"model_type": name}) for name in ("llama", "qwen3"))
    assert (llama.qkv_bias, llama.qk_norm, qwen3.qkv_bias, qwen3.qk_norm) == (False, False, False, True)


def test_head_dim_need_not_be_hidden_over_heads(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN | {"head_dim": 128}).head_dim == 128


def test_key_value_heads_default_to_the_query_heads(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN.items() if key != "num_key_value_heads"}
    assert read(tmp_path, config).num_key_value_heads == 14


def test_rope_is_read_as_transformers_5_writes_it(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert read(tmp_path, config).rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope scaling='dynamic'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"model_type": "gpt2"},
            "model_type='gpt2' is not supported .use one of llama, mixtral, qwen2, qwen3, qwen3_moe;",
        ),
        ({"model_type": None}, "model_type=None"),
    ],
)
def test_what_would_be_dropped_silently_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CapabilityError, match=named):
        read(tmp_path, QWEN | change)


# As transformers 4 writes it (Qwen3-30B-A3B).
QWEN_MOE = QWEN | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Mixtral-8x7B-v0.1
MIXTRAL = {key: value for key, value in QWEN.items() if "sliding" not in key and key != "rope_theta"} | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "sliding_window": None,
    "router_jitter_noise": 0.0,
}


def test_experts_are_read_as_both_versions_of_transformers_write_them(tmp_path: Path) -> None:
    expected = ExpertArchitecture(
        num_experts=128, num_active=8, ffn_hidden_size=768, normalize_probs=True, dense_layers=[]
    )
    assert read(tmp_path, QWEN_MOE).experts == expected
    renamed = {key: value for key, value in QWEN_MOE.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert read(tmp_path, renamed).experts == expected
    assert not read(tmp_path, QWEN_MOE).has_dense_layers


def test_mixtral_normalises_and_has_a_rotary_base_of_its_own(tmp_path: Path) -> None:
    architecture = read(tmp_path, MIXTRAL)
    assert architecture.experts == ExpertArchitecture(
        num_experts=8, num_active=2, ffn_hidden_size=14336, normalize_probs=True, dense_layers=[]
    )
    assert architecture.rope == Rope(theta=1e6) and not architecture.qk_norm


def test_probabilities_are_normalised_only_where_config_json_says_so(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN_MOE.items() if key != "norm_topk_prob"}
    experts = read(tmp_path, config).experts
    assert experts is not None and not experts.normalize_probs


def test_layers_are_dense_where_the_step_or_the_list_says_so(tmp_path: Path) -> None:
    change = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    architecture = read(tmp_path, QWEN_MOE | change)
    # Layers 1, 3, 5 are second ones; 3 is named.
    assert architecture.experts is not None and architecture.experts.dense_layers == [0, 2, 3, 4]
    assert architecture.has_dense_layers
    assert read(tmp_path, QWEN_MOE | change | {"mlp_only_layers": [1, 3, 5]}).experts is None
    assert read(tmp_path, QWEN_MOE | {"num_experts": 0}).experts is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window=4096"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (MIXTRAL | {"num_experts_per_tok": 1}, "num_experts_per_tok=1 gives the one expert of a token the weight 1"),
    ],
)
def test_experts_that_would_be_trained_otherwise_are_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(CapabilityError, match=named):
        read(tmp_path, config)


def test_missing_sizes_of_experts_are_named(tmp_path: Path) -> None:
    config = {key: value for key, value in MIXTRAL.items() if "experts" not in key}
    with pytest.raises(CheckpointError, match="lacks num_local_experts, num_experts_per_tok"):
        read(tmp_path, config)


def test_a_vocabulary_is_padded_to_a_multiple_of_the_tensor_ranks(tmp_path: Path) -> None:
    architecture = read(tmp_path, QWEN | {"vocab_size": 151665})
    assert [architecture.padded_vocab_size(tensor) for tensor in (1, 2, 8)] == [151665, 151666, 151672]


def test_all_missing_keys_are_named(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(CheckpointError, match=r"config\.json: lacks hidden_size, vocab_size"):
        read(tmp_path, config)


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone does not exist"):
        read_architecture(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, holds list"):
        read_architecture(tmp_path)


def test_reading_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, megappo.models.architecture; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
