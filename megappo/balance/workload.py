"""What a sequence costs: a linear term per token plus the attention between all its pairs of tokens.

Shapes: B sequences. Costs are in token equivalents: 1.0 is the work of one token outside attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megappo.observability.flops import model_flops


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
    """Return the workload of a decoder described by its Hugging Face config: `observability.flops`, in tokens whose
    prediction is asked for.

    Raises:
        DataError: a key is missing or not a positive whole number; names it.
    """
    flops = model_flops(config)
    return Workload(pair=flops.per_pair / (flops.per_token + flops.per_prediction))
