"""Packed sequences and the core attention of the local layer spec: torch's scaled dot-product attention.

Shapes: T packed tokens, B sequences and L longest sequence of a bucket, H query heads, G key/value heads, D head size;
R context-parallel ranks, each of which holds T / R of the tokens (`megappo.models.context`).

One attention call per sequence is slow when there are many short ones, one call over all of them wastes quadratic
work, so sequences of like length are gathered into buckets [B, L] and each bucket is one causal call. A row shorter
than L repeats its own last token: it comes after every query that is kept, so causality hides it, and no sequence
ever reads another.

Rotary embeddings are applied here, by the position of each token: one operation on all packed tokens. (Megatron's own,
rope_utils.py:178, slices the angles sequence by sequence in Python, twice per layer, and on CUDA waits for the lengths
to come back to the host each time.)
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

from megappo.models.context import WHOLE, ContextShare, gathered_rows, heads_to_tokens, held_positions, tokens_to_heads

_SHORT = 32
"""Sequences up to this length share a bucket: padding them costs less than another call."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what the local spec needs. Make with `pack_lengths`.

    Lengths and boundaries are those of whole sequences, also where this rank holds a share of them.
    """

    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T / R] int64: position in its sequence of every token of this rank."""
    buckets: list[torch.Tensor] = field(default_factory=list)
    """Per bucket [B, L] int64: row of every entry, in the order in which the tokens of all ranks lie one rank behind
    the other; past a sequence's end its last token again."""
    restore: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T] int64: place of every such row in the concatenation of the flattened buckets."""
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cosine and sine [T / R, 1, D / 2] by which `SdpaCoreAttention` turns queries and keys, set by the model in its
    forward pass; None: they are turned already."""


def pack_lengths(lengths: Sequence[int], *, device: torch.device, share: ContextShare = WHOLE) -> PackedSequences:
    """Describe T = sum(lengths) packed tokens; pass the result as `packed_seq_params`.

    Args:
        lengths: positive, and multiples of `share.multiple`.
    """
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    rows = gathered_rows(lengths, share.size)
    buckets: list[torch.Tensor] = []
    restore = torch.empty(sum(lengths), dtype=torch.int64)
    taken = 0
    for members in _group_by_length(lengths):
        positions, is_own = _bucket(members, lengths, ends)
        in_rank_order = rows[positions]
        restore[in_rank_order[is_own]] = taken + is_own.flatten().nonzero()[:, 0]
        taken += positions.numel()
        buckets.append(in_rank_order.to(device))
    offsets = ends.to(device=device, dtype=torch.int32)
    # Transformer Engine wants the padded offsets named under context parallelism; filler counts as tokens here.
    padded = offsets if share.size > 1 else None
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded,  # type: ignore[arg-type]  # None by default
        cu_seqlens_kv_padded=padded,  # type: ignore[arg-type]
        # Exact, never rounded up: rope_utils.py:180 reads an upper bound that equals T as another position layout.
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=position_ids(lengths, device=device)[0][held_positions(lengths, share).to(device)],
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


def rotation_at(
    positions: torch.Tensor, angles: torch.Tensor, *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [T, 1, D / 2] at the positions [T] of Megatron's rotary embedding [length, 1, 1, D]."""
    half = angles[:, 0, :, : angles.shape[-1] // 2]  # the second half repeats the first
    return tuple(table.to(dtype).index_select(0, positions) for table in (half.cos(), half.sin()))  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    """Turn [T, heads, D] by the angles of `PackedSequences.rotation`; backward turns the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(tensor, cosine, sine)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cosine, sine = ctx.saved_tensors
        return _turned(gradient, cosine, -sine), None, None


def _turned(tensor: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D / 2), as Hugging Face models do."""
    turned = torch.empty_like(tensor)
    (first, second), (new_first, new_second) = tensor.chunk(2, -1), turned.chunk(2, -1)
    torch.mul(first, cosine, out=new_first).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=new_second).addcmul_(first, sine)
    return turned


class SdpaCoreAttention(MegatronModule):
    """Core attention of a Megatron layer on `torch.nn.functional.scaled_dot_product_attention`.

    Takes packed sequences (`PackedSequences`) or a causal [s, b, ...] batch without padding mask and without context
    parallelism; grouped queries.
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
        assert attn_mask_type is AttnMaskType.causal and config.kv_channels is not None
        self._context_group: Any = pg_collection.cp if pg_collection else None  # Any: typed as absent by Megatron
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
        """Return the attention output, [T / R, 1, H * D] for packed [T / R, H or G, D] inputs, [s, b, H * D] else."""
        assert attention_mask is None and attention_bias is None, "padding masks: pack the sequences instead"
        if isinstance(packed_seq_params, PackedSequences):
            return self._packed(query, key, value, packed_seq_params)
        output = self._attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return output.permute(2, 0, 1, 3).flatten(2)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        if packed.rotation is not None:
            query, key = (_Rotate.apply(tensor, *packed.rotation) for tensor in (query, key))
        is_split = self.config.context_parallel_size > 1
        if is_split:
            query, key, value = heads_to_tokens(query, key, value, self._context_group)
        inputs = (_ToBuckets.apply(tensor, packed) for tensor in (query, key, value))
        output = _from_buckets([self._attend(*bucket) for bucket in zip(*inputs)], packed)
        if is_split:
            output = tokens_to_heads(output, self._context_group)
        return output.flatten(1)[:, None]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)
