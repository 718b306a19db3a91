"""What makes decoding with transformers 5 cheap on a CPU: a cache that grows in place and attention without copies.

Measured with the `cpu-grpo-v1` shapes (128 rows, 96 tokens): the cache's concatenation was 37% of the time, and masked
attention took 8.0 ms instead of 1.5 ms a layer.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

GROUPED_ATTENTION = "megappo_grouped"
"""Name of `grouped_attention` for `attn_implementation`."""


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room for all tokens to come.

    transformers' own layer concatenates, and so copies everything, at each token. `keys` and `values`
    [B, heads, tokens, d] are views of the filled part.
    """

    def __init__(self, filled: DynamicLayer, rows: torch.Tensor, capacity: int) -> None:
        """Copy the given rows [B] of a filled layer."""
        super().__init__()
        assert filled.keys is not None and filled.values is not None
        self._capacity = capacity
        self.dtype, self.device = filled.dtype, filled.device
        self.is_initialized = True
        self._take(filled.keys, filled.values, rows)

    def _take(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        length = keys.shape[2]
        self._key_room = keys.new_empty(rows.numel(), keys.shape[1], self._capacity, keys.shape[3])
        self._value_room = values.new_empty(rows.numel(), values.shape[1], self._capacity, values.shape[3])
        self.keys, self.values = self._key_room[:, :, :length], self._value_room[:, :, :length]
        self.keys.copy_(keys[rows])
        self.values.copy_(values[rows])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens; return those of all tokens."""
        assert self.keys is not None
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self._key_room[:, :, start:end] = key_states
        self._value_room[:, :, start:end] = value_states
        self.keys, self.values = self._key_room[:, :, :end], self._value_room[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only."""
        assert self.keys is not None and self.values is not None
        self._take(self.keys, self.values, indices)


def make_room(cache: DynamicCache, rows: torch.Tensor, capacity: int) -> None:
    """Turn a cache filled with prompts into one of rows [B] (row numbers, repeated at will) with room to grow.

    Layers that are not plain attention (sliding windows) keep transformers' way.
    """
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number] = RoomyLayer(layer, rows, capacity)
        else:
            layer.batch_select_indices(rows)  # type: ignore[attr-defined]  # on every layer but not on the base


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_options: object,
) -> tuple[torch.Tensor, None]:
    """Attend with fewer key/value heads than heads without repeating them, also under a mask.

    transformers repeats them whenever there is a mask (integrations/sdpa_attention.py, `use_gqa_in_sdpa`), which is
    right for CUDA kernels only.
    """
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=True,
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
