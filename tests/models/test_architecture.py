"""What is read from config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.errors import CapabilityError, CheckpointError
from megappo.models.architecture import ModelArchitecture, read_architecture

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
        rope_theta=1e6,
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
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling='llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling='linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope scaling='yarn'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported .use one of llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None"),
    ],
)
def test_what_would_be_dropped_silently_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CapabilityError, match=named):
        read(tmp_path, QWEN | change)


def test_all_missing_keys_are_named(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(CheckpointError, match=r"config\.json lacks hidden_size, vocab_size"):
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
