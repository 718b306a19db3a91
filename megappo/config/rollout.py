"""Rollout engines and sampling."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How responses are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_new_tokens: int = 256
    """Most response tokens, the end token included."""


@dataclass(kw_only=True, slots=True)
class SGLangConfig:
    """Settings of one SGLang server."""

    attention_backend: str | None = None
    """None: SGLang's own choice on CUDA, torch_native on CPU."""
    mem_fraction_static: float = 0.5
    """Share of device memory for weights and KV cache."""
    max_total_tokens: int | None = None
    """KV cache size in tokens; None: from mem_fraction_static, and 8192 on CPU."""
    max_running_requests: int = 256
    extra_args: dict[str, str] = field(default_factory=dict)
    """More command-line options of the server, name without dashes to value ('' for a switch)."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout engines."""

    engine: str = "sglang"
    """Registry name (`megappo.rollout.ENGINES`): sglang, or hf (in-process transformers generate)."""
    num_engines: int = 1
    tensor: int = 1
    """Tensor-parallel devices of one engine."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    validation: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Sampling of validation; temperature 0 is greedy."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    start_timeout_s: float = 300.0
    request_timeout_s: float = 300.0
    """Longest wait for one generate call of a group."""


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """Hand-over of trained weights to the rollout engines."""

    transport: str = "broadcast"
    """Registry name (`megappo.weight_sync.TRANSPORTS`)."""
    bucket_bytes: int = 512 * 1024**2
    """Bytes gathered and sent at a time."""
    timeout_s: float = 120.0
    """Deadline of every call of one hand-over."""
