"""What a sequence costs: a linear term per token plus the attention between all its pairs of tokens.

Shapes: B sequences. Costs are in token equivalents: 1.0 is the work of one token outside attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """Cost of a sequence of t tokens: t + pair * t * (t + 1) / 2 (causal attention: each token sees itself and all
    before it)."""

    pair: float = 0.0
    """Cost of one (query, key) pair in token equivalents; 0: the cost is the number of tokens."""

    def costs(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the cost of each sequence, [B] float64."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens + self.pair * tokens * (tokens + 1) / 2


TOKENS = Workload()
"""The default: a sequence costs its tokens."""


def workload_of_model(config: Mapping[str, Any]) -> Workload:  # Any: a Hugging Face config.json
    """Return the workload of a decoder described by its Hugging Face config.

    Multiply-adds of one token: the four attention projections, the gated feed-forward (of the active experts and the
    shared expert in a mixture of experts) in every layer, and the output head; of one pair: a dot product for the
    score and a scaled add of the value, both over all query heads, in every layer.

    Raises:
        DataError: a key is missing or not a positive whole number; names it.
    """
    layers, hidden = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    key_value_heads = _size(config, "num_key_value_heads", default=heads)
    head_dim = _size(config, "head_dim", default=hidden // heads)
    projections = hidden * head_dim * (2 * heads + 2 * key_value_heads)
    per_token = layers * (projections + 3 * hidden * _active_ffn(config)) + hidden * _size(config, "vocab_size")
    return Workload(pair=layers * 2 * heads * head_dim / per_token)


def _active_ffn(config: Mapping[str, Any]) -> int:
    """Return the feed-forward width that one token passes through."""
    experts = _size(config, "num_experts_per_tok", default=0)
    if experts == 0:
        return _size(config, "intermediate_size")
    width = _size(config, "moe_intermediate_size", default=_size(config, "intermediate_size", default=0))
    return experts * width + _size(config, "shared_expert_intermediate_size", default=0)


def _size(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default is None else 0):
        raise DataError(
            f"model config: {key}={value} must be a positive whole number (give a Hugging Face config.json)"
        )
    return value
