"""Memory of rollout engines: weights as they lie on their ranks, and the KV cache that is left for sequences."""

from dataclasses import dataclass

from megappo.config.model import Dtype
from megappo.config.model_shape import ModelShape
from megappo.config.rollout import SGLANG_CPU_CACHE_TOKENS, RolloutConfig
from megappo.planning.cluster import GIB
from megappo.planning.training_memory import ELEMENT_BYTES

_CACHE_BYTES = {"fp8_e5m2": 1, "fp8_e4m3": 1, "bfloat16": 2, "bf16": 2}
"""Bytes of a number in the cache by SGLang's --kv-cache-dtype; others: as the weights."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineMemory:
    """One rank of an engine."""

    weights: int
    cache: int | None
    """Bytes of the KV cache; None: it has none of its own (engine hf), or depends on memory that is not known."""
    bytes_per_token: int
    """Of the KV cache on one rank."""
    tokens: int | None
    """Tokens that the cache holds."""
    sequences: int | None
    """Longest sequences that it holds at a time."""
    limit: str
    """What decides the size of the cache."""

    @property
    def sleeps_to_host(self) -> bool:
        """Whether the weights go to host memory while the engine sleeps; SGLang's are dropped."""
        return self.limit == HF_LIMIT


HF_LIMIT = "engine hf: a cache lives as long as its batch"
CACHE_REMEDY = "raise rollout.sglang.mem_fraction_static or rollout.tensor, or sample shorter sequences"
"""Against a `cache_fault`."""


def engine_memory(
    config: RolloutConfig,
    shape: ModelShape,
    *,
    dtype: Dtype,
    weights: int,
    device_bytes: int | None,
    is_cuda: bool,
    longest: int,
) -> EngineMemory:
    """Return the memory of the fullest rank of an engine.

    SGLang 0.5.23 gives weights and KV cache together the share mem_fraction_static of what is free when it starts
    (srt/mem_cache/kv_cache_configurator.py:2990); here the device is taken as free.

    Args:
        weights: bytes of the rank's weights.
        device_bytes: memory of a device; None: not known.
        longest: tokens of the longest sequence.
    """
    per_token = _bytes_per_token(config, shape, dtype)
    asked = config.sglang.max_total_tokens
    if config.engine != "sglang":
        tokens, limit = None, HF_LIMIT
    elif not is_cuda:
        tokens, limit = asked or SGLANG_CPU_CACHE_TOKENS, "rollout.sglang.max_total_tokens"
        limit += "" if asked else " (default on a CPU)"
    else:
        free = None if device_bytes is None else int(device_bytes * config.sglang.mem_fraction_static) - weights
        room = None if free is None else max(free, 0) // per_token
        tokens, limit = room, "rollout.sglang.mem_fraction_static"
        if asked is not None and (room is None or asked < room):
            tokens, limit = asked, "rollout.sglang.max_total_tokens"
    return EngineMemory(
        weights=weights,
        cache=None if tokens is None else tokens * per_token,
        bytes_per_token=per_token,
        tokens=tokens,
        sequences=None if tokens is None else min(tokens // longest, config.sglang.max_running_requests),
        limit=limit,
    )


def cache_fault(memory: EngineMemory, *, longest: int) -> str | None:
    """Return what is wrong with a cache that cannot hold one sequence of `longest` tokens: SGLang does not start where
    weights leave no room for a cache, and a run is refused when a smaller one is seen."""
    if memory.tokens is None or memory.tokens >= longest:
        return None
    return (
        f"the KV cache of an engine holds {memory.tokens} tokens, and the longest sequence has {longest}: "
        f"{memory.limit} decides it, and weights take {memory.weights / GIB:.2f} GiB"
    )


def _bytes_per_token(config: RolloutConfig, shape: ModelShape, dtype: Dtype) -> int:
    """Return the bytes of a token's keys and values in all layers on one rank: heads are cut, or repeated where there
    are fewer of them than ranks."""
    heads = max(1, shape.num_key_value_heads // config.tensor)
    kind = config.sglang.extra_args.get("kv-cache-dtype", "auto")
    return 2 * shape.num_hidden_layers * heads * shape.head_dim * _CACHE_BYTES.get(kind, ELEMENT_BYTES[dtype])
