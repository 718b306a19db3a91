"""Packed sequences and the core attention of the local layer spec: torch's scaled dot-product attention.

Shapes: T packed tokens, B sequences and L longest sequence of a bucket, H query heads, G key/value heads, D head size.

One attention call per sequence is slow when there are many short ones, one call over all of them wastes quadratic
work, so sequences of like length are gathered into buckets [B, L] and each bucket is one causal call. A row shorter
than L repeats its own last token: it comes after every query that is kept, so causality hides it, and no sequence
ever reads another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_SHORT = 32
"""Sequences up to this length share a bucket: padding them costs less than another call."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with the buckets of the local spec. Make with `pack_lengths`."""

    buckets: list[torch.Tensor] = field(default_factory=list)
    """Per bucket [B, L] int64: packed position of every entry; past a sequence's end its last token again."""
    restore: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T] int64: row of every packed token in the concatenation of the flattened buckets."""


def pack_lengths(lengths: Sequence[int], *, device: torch.device) -> PackedSequences:
    """Describe T = sum(lengths) packed tokens, all lengths positive; pass the result as `packed_seq_params`."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    buckets: list[torch.Tensor] = []
    restore = torch.empty(sum(lengths), dtype=torch.int64)
    rows = 0
    for members in _group_by_length(lengths):
        positions, is_own = _bucket(members, lengths, ends)
        restore[positions[is_own]] = rows + is_own.flatten().nonzero()[:, 0]
        rows += positions.numel()
        buckets.append(positions.to(device))
    offsets = ends.to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        # Exact, never rounded up: rope_utils.py:180 reads an upper bound that equals T as another position layout.
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=buckets,
        restore=restore.to(device),
    )


def position_ids(lengths: Sequence[int], *, device: torch.device) -> torch.Tensor:
    """Return the position of every packed token in its sequence, [1, T] int64."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences so that none is shorter than 3/4 of the longest of its group, very short ones apart."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (longest <= _SHORT or 4 * lengths[index] >= 3 * longest):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _bucket(members: list[int], lengths: Sequence[int], ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed positions of a bucket [B, L] and whether an entry is a token of its own (not a repetition)."""
    starts = ends[:-1][members, None]  # [B, 1]
    own = torch.tensor([lengths[member] for member in members])[:, None]  # [B, 1]
    column = torch.arange(lengths[members[0]])[None]  # [1, L]
    return starts + torch.minimum(column, own - 1), column < own


class _ToBuckets(torch.autograd.Function):
    """[T, heads, D] -> per bucket [B, heads, L, D].

    Backward reads the gradient of each token's own entry and leaves out the repetitions, which no kept query sees:
    a gather, where autograd would fill and add one [T, heads, D] per bucket.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, packed: PackedSequences) -> tuple[torch.Tensor, ...]:
        ctx.packed = packed
        return tuple(
            tensor.index_select(0, positions.flatten()).view(*positions.shape, *tensor.shape[1:]).transpose(1, 2)
            for positions in packed.buckets
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _from_buckets(gradients, ctx.packed), None


def _from_buckets(buckets: Sequence[torch.Tensor], packed: PackedSequences) -> torch.Tensor:
    """Per bucket [B, heads, L, D] -> [T, heads, D]."""
    rows = [bucket.transpose(1, 2).flatten(0, 1) for bucket in buckets]
    return torch.cat(rows).index_select(0, packed.restore)


class SdpaCoreAttention(MegatronModule):
    """Core attention of a Megatron layer on `torch.nn.functional.scaled_dot_product_attention`.

    Takes packed sequences (`PackedSequences`) or a causal [s, b, ...] batch without padding mask; grouped queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.causal and config.context_parallel_size == 1
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the attention output, [T, 1, H * D] for packed [T, H or G, D] inputs, [s, b, H * D] otherwise."""
        assert attention_mask is None and attention_bias is None, "padding masks: pack the sequences instead"
        if isinstance(packed_seq_params, PackedSequences):
            return self._packed(query, key, value, packed_seq_params)
        output = self._attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return output.permute(2, 0, 1, 3).flatten(2)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        inputs = (_ToBuckets.apply(tensor, packed) for tensor in (query, key, value))
        outputs = [self._attend(*bucket) for bucket in zip(*inputs)]
        return _from_buckets(outputs, packed).flatten(1)[:, None]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # Any: Megatron's signature
        """Nothing to save."""
        return {}
