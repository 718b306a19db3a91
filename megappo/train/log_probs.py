"""Log-prob and entropy of chosen tokens, from hidden states and the output weight, whose vocabulary is split over
tensor-parallel ranks. The logits themselves exist nowhere: see `megappo.train.fused_head`.

Shapes: T rows of hidden states, n rows that are asked for, V vocabulary, V/tp columns of this rank, H hidden features.

Invariants (asserted by tests/train/test_log_probs.py and test_fused_head.py):
1. The results, and the gradient of the hidden states (summed over the ranks) and of each shard of the weight, equal
   those of softmax(hidden @ weight.T / temperature) over the whole vocabulary, however it is cut into tiles.
2. Softmax and sums are computed in fp32, whatever the type of hidden states and weight.
3. Beside the gradients, forward and backward hold tiles of logits and numbers per row, never [n, V/tp].
4. Columns beyond the true vocabulary (padding up to a multiple of the tensor-parallel size) take no probability.
5. Two collectives of [n] numbers per call, whatever the number of tiles; none when one rank holds the vocabulary.
6. Rows that are not asked for, and in backward those without gradient, are not projected.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megappo.train.fused_head import FusedHead, HeadOptions, VocabShard


def vocab_shard(vocab_size: int, columns: int, group: Any) -> VocabShard:
    """Return the shard of this rank when each rank of `group` holds `columns` columns, the last ones padding.

    Args:
        group: the tensor-parallel process group (Megatron types it as anything), or None.
    """
    if group is None or group.size() == 1:
        return VocabShard(start=0, size=vocab_size)
    start = group.rank() * columns
    return VocabShard(start=start, size=min(columns, max(0, vocab_size - start)), group=group)


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenStatistics:
    """Per asked token, fp32, the same on every rank that shares the vocabulary."""

    log_probs: torch.Tensor
    """[n] log softmax(logits / temperature) of the chosen token."""
    entropy: torch.Tensor | None
    """[n] -sum p log p; None when not asked for."""
    sum_squared_probs: torch.Tensor | None
    """[n] sum p^2, without gradient; None when not asked for."""


def compute_token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    options: HeadOptions,
) -> TokenStatistics:
    """Return statistics of `tokens[i]` under row `rows[i]` of logits = hidden @ weight.T.

    They have a gradient in `weight` and in `hidden`, of which each rank computes the part that goes through its
    columns: the caller sums it over the ranks that share the vocabulary.

    Args:
        hidden: [T, H] hidden states, the same on those ranks, any floating type.
        weight: [V/tp, H] output weight of this rank, of the same type.
        rows: [n] int64, each row at most once.
        tokens: [n] int64 token ids of the whole vocabulary.
    """
    log_probs, entropy, squares = FusedHead.apply(hidden, weight, rows, tokens, options)
    return TokenStatistics(
        log_probs=log_probs,
        entropy=entropy if options.with_entropy else None,
        sum_squared_probs=squares if options.with_sum_squared_probs else None,
    )
