"""KV caches by hand."""

import pytest

from megappo.config.model import Dtype
from megappo.config.model_shape import ModelShape
from megappo.config.rollout import RolloutConfig
from megappo.planning.engine_memory import EngineMemory, cache_fault, engine_memory

# 4 layers, 2 key/value heads of 8: 4 * 2 * 2 * 8 = 128 numbers per token.
SHAPE = ModelShape(
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=4,
    hidden_size=64,
    head_dim=8,
    max_position_embeddings=100,
)


def _memory(config: RolloutConfig, *, device: int | None = 10_000_000, is_cuda: bool = True) -> EngineMemory:
    return engine_memory(
        config,
        SHAPE,
        dtype=Dtype.bfloat16,
        weights=1_000_000,
        device_bytes=device,
        is_cuda=is_cuda,
        longest=100,
    )


def test_the_cache_gets_the_static_share_less_the_weights() -> None:
    memory = _memory(RolloutConfig())  # half of the device
    assert memory.bytes_per_token == 256
    assert memory.tokens == (5_000_000 - 1_000_000) // 256 == 15625
    assert memory.cache == 15625 * 256 and memory.sequences == 156


@pytest.mark.parametrize(("tensor", "per_token"), [(2, 128), (4, 128)])
def test_key_value_heads_are_cut_and_repeated_where_there_are_fewer_than_ranks(tensor: int, per_token: int) -> None:
    assert _memory(RolloutConfig(tensor=tensor)).bytes_per_token == per_token


def test_a_cache_in_fp8_takes_half() -> None:
    config = RolloutConfig()
    config.sglang.extra_args = {"kv-cache-dtype": "fp8_e5m2"}
    assert _memory(config).bytes_per_token == 128


def test_the_number_of_tokens_and_of_requests_that_is_asked_for_limits_it() -> None:
    config = RolloutConfig()
    config.sglang.max_total_tokens, config.sglang.max_running_requests = 5000, 3
    memory = _memory(config)
    assert (memory.tokens, memory.sequences, memory.limit) == (5000, 3, "rollout.sglang.max_total_tokens")
    config.sglang.max_total_tokens = 50_000
    assert _memory(config).limit == "rollout.sglang.mem_fraction_static"


def test_weights_above_the_share_leave_no_cache() -> None:
    config = RolloutConfig()
    config.sglang.mem_fraction_static = 0.05
    assert _memory(config).tokens == 0


def test_on_a_cpu_the_cache_has_a_fixed_number_of_tokens() -> None:
    assert _memory(RolloutConfig(), device=None, is_cuda=False).tokens == 8192


def test_without_known_memory_and_in_process_the_cache_is_not_known() -> None:
    assert _memory(RolloutConfig(), device=None).cache is None
    assert _memory(RolloutConfig(engine="hf")).cache is None


@pytest.mark.parametrize(
    ("share", "tokens", "told"),
    [
        (0.05, None, "0 tokens, and the longest sequence has 100"),  # the weights alone take 1 of 10 MB
        (0.102, None, "78 tokens, and the longest sequence has 100"),  # 20,000 bytes of 256 each
        (0.5, 99, "99 tokens, and the longest sequence has 100"),
        (0.5, 100, ""),
        (0.5, None, ""),
    ],
)
def test_a_cache_that_cannot_hold_the_longest_sequence_is_a_fault(share: float, tokens: int | None, told: str) -> None:
    config = RolloutConfig()
    config.sglang.mem_fraction_static, config.sglang.max_total_tokens = share, tokens
    fault = cache_fault(_memory(config), longest=100)
    assert (fault is None) == (not told) and told in (fault or "")


def test_a_cache_of_a_size_that_is_not_known_is_no_fault() -> None:
    assert cache_fault(_memory(RolloutConfig(), device=None), longest=100) is None
    assert cache_fault(_memory(RolloutConfig(engine="hf")), longest=100) is None
