"""Matmul FLOPs of a pass over packed sequences, exactly, from the sizes in a Hugging Face config. Torch-free.

Lies here, below everything that counts (scheduling, training loop, benchmarks, planning), and reads a config.json
rather than a built model, so that all of them use one formula.

What counts, a multiply-add being two FLOPs:
- every matmul of every decoder layer, for each input token: attention projections (grouped-query or multi-head latent
  attention), the gated feed-forward; in a mixture of experts the router, the active and the shared experts;
- attention: score and weighted value of each (query, key) pair that a causal mask leaves, in each sequence alone:
  t (t + 1) / 2 pairs for t input tokens;
- the head (vocabulary projection or value head) for each predicted token, and for no other.
What does not: the embedding lookup, norms, rotary embedding, activations and the optimizer (no matmuls), filler, and
whatever is computed again: that is work of the hardware, not of the model (`recomputed`).

The last token of a sequence predicts nothing, so it is no input: n tokens are n - 1 input tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megappo.config.lora import LoraConfig
from megappo.config.memory import RecomputeConfig, RecomputeGranularity, RecomputeMethod
from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class PassSize:
    """What a pass runs over."""

    tokens: int
    """Input tokens, without filler."""
    pairs: int
    """(query, key) pairs under the causal mask of each sequence."""
    predictions: int
    """Tokens whose prediction is asked for."""


def pass_size(lengths: Sequence[int] | np.ndarray, *, predictions: int) -> PassSize:
    """Return the size of a pass over whole sequences.

    Args:
        lengths: tokens of each sequence, prompt included.
        predictions: predicted tokens: response tokens of a forward pass, loss tokens of an update.
    """
    inputs = np.maximum(np.asarray(lengths, dtype=np.int64) - 1, 0)
    return PassSize(tokens=int(inputs.sum()), pairs=int((inputs * (inputs + 1) // 2).sum()), predictions=predictions)


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFlops:
    """Forward FLOPs of one model per unit of a pass; whole numbers."""

    num_layers: int
    projections: int
    """Of one input token in the attention projections of all layers."""
    dense: int
    """Of one input token in all dense feed-forward layers."""
    experts: int
    """Of one input token in all layers of experts: router, active and shared experts."""
    per_pair: int
    """Of one (query, key) pair in all layers."""
    per_prediction: int
    """Of one predicted token in the head."""
    adapters: int = 0
    """Of one input token in the low-rank adapters of all layers; with them all other weights are frozen, but those of a
    value head."""
    trains_head: bool = True

    @property
    def per_token(self) -> int:
        """Of one input token in all layers, outside attention between tokens."""
        return self.projections + self.dense + self.experts + self.adapters

    def layers(self, size: PassSize) -> int:
        """Return the forward FLOPs of all layers."""
        return self.per_token * size.tokens + self.per_pair * size.pairs

    def forward(self, size: PassSize) -> int:
        """Return the FLOPs of a forward pass."""
        return self.layers(size) + self.per_prediction * size.predictions

    def backward(self, size: PassSize) -> int:
        """Return the FLOPs of a backward pass: each product of the forward pass has a gradient for either factor, but
        none for a frozen weight. (The first layer's input has one, too: of the embedding, or for recomputation.)"""
        frozen = (self.per_token - self.adapters) * size.tokens if self.adapters else 0
        frozen += 0 if self.trains_head else self.per_prediction * size.predictions
        return 2 * self.forward(size) - frozen

    def training(self, size: PassSize) -> int:
        """Return the FLOPs of forward and backward together."""
        return self.forward(size) + self.backward(size)

    def recomputed(self, size: PassSize, recompute: RecomputeConfig, *, chunks: int) -> float:
        """Return the FLOPs that backward spends on computing layers again; all layers count as equal.

        Args:
            chunks: pieces that the layers are cut into: pipeline stages times virtual stages.
        """
        if recompute.granularity is RecomputeGranularity.none:
            return 0.0
        if recompute.granularity is RecomputeGranularity.full:
            block = recompute.method is RecomputeMethod.block
            taken = min(recompute.num_layers * chunks, self.num_layers) if block else self.num_layers
            return self.layers(size) * taken / self.num_layers
        of_module = {
            "core_attn": self.per_pair * size.pairs,
            "mlp": self.dense * size.tokens,
            "moe": self.experts * size.tokens,
        }
        return float(sum(of_module.get(module, 0) for module in recompute.modules))


def model_flops(
    config: Mapping[str, Any],  # Any: a config.json
    *,
    value_head: bool = False,
    lora: LoraConfig | None = None,
) -> ModelFlops:
    """Return the FLOPs of a decoder described by its Hugging Face config (a nested `text_config` is looked into).

    Args:
        value_head: the model ends in one value per token instead of the vocabulary.
        lora: adapters. The reference policy runs without them; its passes are counted as if it did not, which makes
            them about 2 * rank / hidden size too high.

    Raises:
        DataError: a key is missing or not a positive whole number; names it.
    """
    sizes: Mapping[str, Any] = config.get("text_config") or config
    layers, hidden = _size(sizes, "num_hidden_layers"), _size(sizes, "hidden_size")
    projections, pair = _latent_attention(sizes) if sizes.get("kv_lora_rank") else _grouped_attention(sizes)
    sparse = _sparse_layers(sizes)
    return ModelFlops(
        num_layers=layers,
        projections=2 * layers * projections,
        dense=2 * (layers - sparse) * 3 * hidden * _size(sizes, "intermediate_size") if sparse < layers else 0,
        experts=2 * sparse * _experts(sizes) if sparse else 0,
        per_pair=2 * layers * pair,
        per_prediction=2 * hidden * (1 if value_head else _size(sizes, "vocab_size")),
        adapters=2 * _adapters(sizes, lora, dense_layers=layers - sparse) if lora is not None else 0,
        trains_head=lora is None or value_head,
    )


def _adapters(sizes: Mapping[str, Any], lora: LoraConfig, *, dense_layers: int) -> int:
    """Return the multiply-adds of one token in the adapters of all layers: rank * (inputs + outputs) of a matrix."""
    hidden, heads = _size(sizes, "hidden_size"), _size(sizes, "num_attention_heads")
    head_dim = _size(sizes, "head_dim", default=hidden // heads)
    queries, keys = heads * head_dim, _size(sizes, "num_key_value_heads", default=heads) * head_dim
    attention = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
    }
    total = _size(sizes, "num_hidden_layers") * sum(attention.get(name, 0) for name in lora.targets)
    in_mlp = [name for name in lora.targets if name not in attention]
    if in_mlp and dense_layers:
        total += dense_layers * len(in_mlp) * (hidden + _size(sizes, "intermediate_size"))
    return lora.rank * total


def _grouped_attention(sizes: Mapping[str, Any]) -> tuple[int, int]:
    """Return the multiply-adds of one layer (per token, per pair) with grouped key/value heads."""
    hidden, heads = _size(sizes, "hidden_size"), _size(sizes, "num_attention_heads")
    key_value_heads = _size(sizes, "num_key_value_heads", default=heads)
    head_dim = _size(sizes, "head_dim", default=hidden // heads)
    return hidden * head_dim * (2 * heads + 2 * key_value_heads), 2 * heads * head_dim


def _latent_attention(sizes: Mapping[str, Any]) -> tuple[int, int]:
    """Return the multiply-adds of one layer (per token, per pair) with multi-head latent attention, keys and values
    expanded as in training (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads = _size(sizes, "hidden_size"), _size(sizes, "num_attention_heads")
    rope, value = _size(sizes, "qk_rope_head_dim"), _size(sizes, "v_head_dim")
    plain = _size(sizes, "qk_nope_head_dim")
    key_value_rank, query_rank = _size(sizes, "kv_lora_rank"), _size(sizes, "q_lora_rank", default=0)
    queries = heads * (plain + rope)
    query = query_rank * (hidden + queries) if query_rank else hidden * queries
    key_value = hidden * (key_value_rank + rope) + key_value_rank * heads * (plain + value)
    return query + key_value + heads * value * hidden, heads * (plain + rope + value)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call the number of experts; 0 of them is a dense model, whatever else the config says of experts."""


def _sparse_layers(sizes: Mapping[str, Any]) -> int:
    """Return the number of layers that hold experts."""
    layers = _size(sizes, "num_hidden_layers")
    counts = [sizes.get(name) for name in _EXPERT_COUNTS if sizes.get(name) is not None]
    if _size(sizes, "num_experts_per_tok", default=0) == 0 or (counts and not any(counts)):
        return 0
    dense: Iterable[int] = sizes.get("mlp_only_layers") or ()
    step = _size(sizes, "decoder_sparse_step", default=1) or 1
    first = _size(sizes, "first_k_dense_replace", default=0)
    return sum((layer + 1) % step == 0 and layer >= first for layer in set(range(layers)) - set(dense))


def _experts(sizes: Mapping[str, Any]) -> int:
    """Return the multiply-adds of one token in one layer of experts: router, active experts, shared experts."""
    hidden = _size(sizes, "hidden_size")
    width = _size(sizes, "moe_intermediate_size", default=0) or _size(sizes, "intermediate_size")
    counts = [name for name in _EXPERT_COUNTS if sizes.get(name)]
    router = hidden * _size(sizes, counts[0] if counts else "num_experts")
    active = 3 * hidden * width * _size(sizes, "num_experts_per_tok")
    shared = 3 * hidden * width * _size(sizes, "n_shared_experts", default=0)
    gated = _size(sizes, "shared_expert_intermediate_size", default=0)
    if gated:  # this one has a gate of its own
        shared += 3 * hidden * gated + hidden
    return router + active + shared


def _size(sizes: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = sizes.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default is None else 0):
        raise DataError(
            f"model config: {key}={value} must be a positive whole number (give a Hugging Face config.json)"
        )
    return value
