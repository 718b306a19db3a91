"""How long a sequence an SGLang server (0.5.23) takes without cutting it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.config.rollout import SGLANG_KEPT_TOKENS
from megappo.rollout.model_folder import read_positions, read_vocabulary_size
from megappo.rollout.prompts import RequestLimits


def request_limits(info: Mapping[str, Any], folder: Path) -> RequestLimits:  # Any: decoded JSON
    """Return the limits of a server that answered /server_info with `info`."""
    positions = read_positions(folder)
    context = info.get("context_length") or positions
    cache = info["max_total_num_tokens"] - SGLANG_KEPT_TOKENS
    limits = [(cache, f"the KV cache (rollout.sglang.max_total_tokens less {SGLANG_KEPT_TOKENS})")]
    if positions is not None:
        limits.append((positions, "the model's positions"))
    if context is not None:
        limits.append((context - SGLANG_KEPT_TOKENS, f"the server's context less {SGLANG_KEPT_TOKENS}"))
    tokens, reason = min(limits)
    return RequestLimits(vocabulary=read_vocabulary_size(folder), tokens=tokens, reason=reason)
