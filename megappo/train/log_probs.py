"""Log-prob and entropy of chosen tokens under logits whose vocabulary is split over tensor-parallel ranks.

Shapes: T rows of logits, n rows that are asked for, V vocabulary, V/tp columns of this rank.

Invariants (asserted by tests/train/test_log_probs.py):
1. The results and the gradient of each shard equal those of softmax(logits / temperature) over the whole vocabulary.
2. Neither the logits nor anything autograd needs is written to. (Megatron's vocab_parallel_cross_entropy,
   tensor_parallel/cross_entropy.py, overwrites its logits, so a second use of them is silently wrong.)
3. fp32 copies of logits are bounded by a tile of rows, whatever the dtype of the logits, forward and backward.
4. Columns beyond the true vocabulary (padding up to a multiple of the tensor-parallel size) take no probability.
5. Two collectives of [n] numbers per call, whatever the number of tiles; none when one rank holds the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

TILE_ELEMENTS = 2**22
"""Elements of one tile of logits (16 MiB in fp32)."""

_NO_COLUMNS = -1e30
"""Stands for the largest logit of a shard without real tokens: finite, so that 0 * (it - m) is 0 and not NaN."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VocabShard:
    """The columns of the vocabulary that this rank holds."""

    start: int
    """Token id of the first column."""
    size: int
    """Columns that are tokens; the columns after them are padding."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other columns; None: this rank holds all."""


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
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_squared_probs: bool = False,
) -> TokenStatistics:
    """Return statistics of `tokens[i]` under row `rows[i]` of the logits, differentiable in the logits.

    Args:
        logits: [T, V/tp] columns of this rank, any floating dtype; not modified.
        rows: [n] int64, each row at most once.
        tokens: [n] int64 token ids of the whole vocabulary.
        temperature: positive; logits are divided by it.
    """
    outputs = _TokenStatistics.apply(logits, rows, tokens, shard, temperature, with_entropy, with_sum_squared_probs)
    log_probs, entropy, squares = outputs
    return TokenStatistics(
        log_probs=log_probs,
        entropy=entropy if with_entropy else None,
        sum_squared_probs=squares if with_sum_squared_probs else None,
    )


class _TokenStatistics(torch.autograd.Function):
    """One softmax for all results; backward recomputes it tile by tile from the logits, which are kept as they are."""

    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        largest = logits.new_full((len(rows),), _NO_COLUMNS, dtype=torch.float32)
        # Per row, relative to the largest logit of the shard: sum e^z, sum z e^z, sum e^2z; and the chosen logit.
        sums = logits.new_zeros((4, len(rows)), dtype=torch.float32)
        for tile in _tiles(rows, logits) if shard.size else ():
            scaled = _scaled_logits(logits, rows[tile], shard, temperature)
            column, held = _columns_of(tokens[tile], shard)
            sums[3, tile] = scaled.gather(1, column).squeeze(1) * held
            largest[tile] = scaled.amax(1)
            scaled -= largest[tile].unsqueeze(1)
            exponentials = scaled.exp()
            sums[0, tile] = exponentials.sum(1)
            if with_entropy:
                sums[1, tile] = scaled.mul_(exponentials).sum(1)
            if with_squares:
                sums[2, tile] = exponentials.square_().sum(1)
        largest = _combine_shards(largest, sums, shard.group)

        log_normalizer = largest + sums[0].log()
        log_probs = sums[3] - log_normalizer
        # H = log sum e^z - sum z e^z / sum e^z, with z relative to the largest logit.
        entropy = sums[0].log() - sums[1] / sums[0] if with_entropy else logits.new_empty(0)
        squares = sums[2] / sums[0].square() if with_squares else logits.new_empty(0)
        ctx.save_for_backward(logits, rows, tokens, log_normalizer, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.mark_non_differentiable(*((squares,) if with_entropy else (entropy, squares)))
        ctx.set_materialize_grads(False)
        return log_probs, entropy, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Any, grad_entropy: Any, _: Any) -> tuple[torch.Tensor | None, ...]:
        # d log p_k / dz_j = [j = k] - p_j   and   dH / dz_j = -p_j (log p_j + H)
        logits, rows, tokens, log_normalizer, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        gradient = torch.zeros_like(logits)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_normalizer)
        for tile in _tiles(rows, logits) if shard.size else ():
            log_p = _scaled_logits(logits, rows[tile], shard, ctx.temperature)
            log_p -= log_normalizer[tile].unsqueeze(1)
            part = log_p.exp()
            outer = grad_log_probs[tile].unsqueeze(1)
            if grad_entropy is None:
                part *= -outer
            else:
                log_p += entropy[tile].unsqueeze(1)
                part *= log_p.mul_(-grad_entropy[tile].unsqueeze(1)).sub_(outer)
            column, held = _columns_of(tokens[tile], shard)
            part.scatter_add_(1, column, outer * held.unsqueeze(1))
            part /= ctx.temperature
            gradient[:, : shard.size].index_copy_(0, rows[tile], part.to(gradient.dtype))
        return gradient, None, None, None, None, None, None


def _tiles(rows: torch.Tensor, logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the asked rows such that a tile of logits has at most TILE_ELEMENTS elements."""
    step = max(1, TILE_ELEMENTS // logits.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))


def _scaled_logits(logits: torch.Tensor, rows: torch.Tensor, shard: VocabShard, temperature: float) -> torch.Tensor:
    """Return a fresh fp32 copy [rows, size] of logits / temperature without the padding columns."""
    scaled = logits[:, : shard.size].index_select(0, rows).float()
    return scaled if temperature == 1.0 else scaled.div_(temperature)


def _columns_of(tokens: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column [n, 1] of each token in this shard (0 for those of other ranks), and whether it is here [n]."""
    column = tokens - shard.start
    held = (column >= 0) & (column < shard.size)
    return (column * held).unsqueeze(1), held


def _combine_shards(largest: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Make `sums` those of the whole vocabulary, in place, relative to its largest logit, which is returned."""
    if group is None or not largest.numel():
        return largest
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    shift = largest - overall
    scale = shift.exp()
    sums[1] = scale * (sums[1] + shift * sums[0])
    sums[0] *= scale
    sums[2] *= scale.square()
    dist.all_reduce(sums, group=group)
    return overall
