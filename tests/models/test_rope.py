"""Rotary frequencies against those of transformers, and what config.json says about them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megappo.config.model_support import missing_of_rope, unsupported_rope
from megappo.models.rope import Rope, YarnScaling, read_rope
from megappo.models.rope_frequencies import compute_frequencies

# Llama-3.1-8B, Llama-3.2-1B, a long LongChat, and Qwen2.5 as its model card extends it; DeepSeek's weights of the log.
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_LONG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = [
    LLAMA_3_1,
    LLAMA_3_1 | {"factor": 32.0},
    {"rope_type": "linear", "factor": 8.0},
    QWEN_LONG,
    QWEN_LONG | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    QWEN_LONG | {"mscale": 1.0, "mscale_all_dim": 0.707},
    QWEN_LONG | {"attention_factor": 1.3},
]


def read(config: dict[str, Any]) -> Rope:
    assert [*unsupported_rope(config), *missing_of_rope(config)] == []
    return read_rope(config, default_theta=1e4)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_and_scale_are_those_of_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    parameters = {"rope_theta": 5e5, **scaling}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = read({"rope_parameters": parameters, "max_position_embeddings": 131072})
    # The same operations in float32, up to the last bit of a division.
    torch.testing.assert_close(compute_frequencies(rope, head_dim), expected, rtol=1e-6, atol=0)
    mine = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    assert mine == pytest.approx(attention_factor, rel=1e-12)


def test_frequencies_without_scaling_fall_from_1_by_the_base() -> None:
    frequencies = compute_frequencies(Rope(theta=1e4), 4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.01]))


def test_transformers_4_and_5_spell_the_same_settings_differently() -> None:
    of_5 = read({"rope_parameters": {**LLAMA_3_1, "rope_theta": 5e5}})
    of_4 = read({"rope_theta": 5e5, "rope_scaling": LLAMA_3_1})
    older = {"type" if key == "rope_type" else key: value for key, value in LLAMA_3_1.items()}
    assert of_5 == of_4 == read({"rope_theta": 5e5, "rope_scaling": older})
    assert read({}) == Rope(theta=1e4) == read({"rope_scaling": None})


def test_the_original_context_is_looked_for_where_transformers_does() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    beside = read({"rope_scaling": scaling, "original_max_position_embeddings": 4096, "max_position_embeddings": 8192})
    assert isinstance(beside.scaling, YarnScaling) and beside.scaling.original_positions == 4096
    fallback = read({"rope_scaling": scaling, "max_position_embeddings": 8192})
    assert isinstance(fallback.scaling, YarnScaling) and fallback.scaling.original_positions == 8192


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling='dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "only default, linear, llama3, yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "of their own for full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ],
)
def test_what_would_give_other_numbers_is_refused(content: dict[str, Any], named: str) -> None:
    (fault,) = unsupported_rope(content)
    assert named in str(fault)


@pytest.mark.parametrize(
    "missing", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
)
def test_a_scaling_without_one_of_its_numbers_is_refused(missing: str) -> None:
    scaling = {key: value for key, value in LLAMA_3_1.items() if key != missing}
    (fault,) = missing_of_rope({"rope_scaling": scaling})
    assert fault.problem == f"rope scaling 'llama3' lacks {missing}"
