"""Output projection, softmax and the statistics of chosen tokens in one function that never holds their logits.

Shapes: T input positions, n of them that are asked for, V vocabulary, V/tp columns of this rank, H hidden features.

With z_j the logits divided by the temperature, p = softmax(z) and k the chosen token, forward needs per row the sums
of e^z, z e^z and e^2z and z_k, which it collects over tiles relative to the largest logit so far (online softmax,
Milakov and Gimelshein 2018, arXiv:1805.02867). Backward computes each tile once more:

    d log p_k / dz_j = [j = k] - p_j   and   dH / dz_j = -p_j (log p_j + H)   with H the entropy.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megappo.train.logit_tiles import LogitTiles

_NO_COLUMNS = -1e30
"""Stands for the largest logit where there is none yet: finite, so that 0 * (it - m) is 0 and not NaN."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VocabShard:
    """The columns of the vocabulary that this rank holds."""

    start: int
    """Token id of the first column."""
    size: int
    """Columns that are tokens; the columns after them are padding."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other columns; None: this rank holds all."""

    def columns_of(self, tokens: torch.Tensor, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place [n, 1] of each token in a range of columns (0 for others), and whether it is there [n]."""
        column = tokens - (self.start + columns.start)
        held = (column >= 0) & (column < columns.stop - columns.start)
        return (column * held).unsqueeze(1), held


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadOptions:
    """What is computed and how."""

    shard: VocabShard
    """What the rows of the weight are."""
    temperature: float = 1.0
    """Positive; logits are divided by it."""
    with_entropy: bool = False
    with_sum_squared_probs: bool = False
    fp32: bool = False
    """Compute the matrix products in fp32, too, where hidden states and weight have a 16-bit type."""


class FusedHead(torch.autograd.Function):
    """(hidden [T, H], weight [V/tp, H], rows [n], tokens [n], options) -> log-probs, entropy, sum of squares, each [n]
    and empty when not asked for. The gradient of `hidden` is this rank's part; it is to be summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        hidden: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        options: HeadOptions,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tiles = _tiles(hidden, weight, rows, options)
        largest, sums = _sums(tiles, tokens, options)
        largest = _combine_shards(largest, sums, options.shard.group)

        log_normalizer = largest + sums[0].log()
        log_probs = sums[3] - log_normalizer
        # H = log sum e^z - sum z e^z / sum e^z, with z relative to the largest logit.
        entropy = sums[0].log() - sums[1] / sums[0] if options.with_entropy else sums.new_empty(0)
        squares = sums[2] / sums[0].square() if options.with_sum_squared_probs else sums.new_empty(0)
        ctx.save_for_backward(hidden, weight, rows, tokens, log_normalizer, entropy)
        ctx.options = options
        ctx.mark_non_differentiable(*((squares,) if options.with_entropy else (entropy, squares)))
        ctx.set_materialize_grads(False)
        return log_probs, entropy, squares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Any, grad_entropy: Any, _: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, rows, tokens, log_normalizer, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_normalizer)
        # Rows without gradient (advantage 0, clipped) cost nothing.
        works = grad_log_probs != 0 if grad_entropy is None else (grad_log_probs != 0) | (grad_entropy != 0)
        places = works.nonzero().squeeze(1)
        if len(places) < len(rows):
            rows, tokens, log_normalizer = rows[places], tokens[places], log_normalizer[places]
            grad_log_probs = grad_log_probs[places]
            if grad_entropy is not None:
                entropy, grad_entropy = entropy[places], grad_entropy[places]
        slope = _Slope(
            tokens=tokens,
            shard=ctx.options.shard,
            log_normalizer=log_normalizer,
            entropy=entropy,
            # Of the logits before they are divided by the temperature.
            grad_log_probs=grad_log_probs / ctx.options.temperature,
            grad_entropy=None if grad_entropy is None else grad_entropy / ctx.options.temperature,
        )
        tiles = _tiles(hidden, weight, rows, ctx.options)
        grad_hidden, grad_weight = _gradients(tiles, weight, slope, wanted=ctx.needs_input_grad)
        if grad_hidden is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden.to(hidden.dtype))
        return grad_hidden, grad_weight, None, None, None


def _tiles(hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, options: HeadOptions) -> LogitTiles:
    """Return the tiles of the rows that are asked for and the columns that are tokens."""
    states = hidden.index_select(0, rows)
    if options.fp32:
        states = states.to(torch.promote_types(states.dtype, torch.float32))
    return LogitTiles(states, weight[: options.shard.size], scale=1.0 / options.temperature)


def _sums(tiles: LogitTiles, tokens: torch.Tensor, options: HeadOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per row the largest logit z of this rank [n] and, relative to it, sum e^z, sum z e^z, sum e^2z, and the
    logit of the chosen token (0 where another rank holds it), [4, n]."""
    largest = torch.full(tokens.shape, _NO_COLUMNS, dtype=tiles.dtype, device=tokens.device)
    sums = largest.new_zeros((4, len(tokens)))
    buffer = tiles.new_buffer() if options.with_entropy else None
    for columns, weight in tiles.columns():
        for rows in tiles.rows():
            logits = tiles.logits(rows, weight)
            column, held = options.shard.columns_of(tokens[rows], columns)
            sums[3, rows] += logits.gather(1, column).squeeze(1) * held
            _add_tile(
                largest[rows],
                sums[:, rows],
                logits,
                is_first=columns.start == 0,
                buffer=buffer,
                squares=options.with_sum_squared_probs,
            )
    return largest, sums


def _add_tile(
    largest: torch.Tensor,
    sums: torch.Tensor,
    logits: torch.Tensor,
    *,
    is_first: bool,
    buffer: torch.Tensor | None,
    squares: bool,
) -> None:
    """Take a tile of logits [r, c] into `largest` [r] and `sums` [4, r], in place; the logits are overwritten.

    Args:
        is_first: nothing is summed yet.
        buffer: where the exponentials go; None: z e^z is not summed.
    """
    overall = logits.amax(1)
    if not is_first:
        overall = torch.maximum(largest, overall)
        _rebase(sums, largest - overall)
    largest.copy_(overall)
    logits -= overall.unsqueeze(1)
    if buffer is None:
        exponentials = logits.exp_()
    else:
        exponentials = torch.exp(logits, out=buffer[: logits.numel()].view(logits.shape))
        sums[1] += logits.mul_(exponentials).sum(1)
    sums[0] += exponentials.sum(1)
    if squares:
        sums[2] += exponentials.square_().sum(1)


def _rebase(sums: torch.Tensor, shift: torch.Tensor) -> None:
    """Make `sums` [4, r] relative to another logit, in place; `shift` [r] is the former minus that one."""
    scale = shift.exp()
    sums[1] = scale * (sums[1] + shift * sums[0])
    sums[0] *= scale
    sums[2] *= scale.square()


def _combine_shards(largest: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Make `sums` those of the whole vocabulary, in place, relative to its largest logit, which is returned."""
    if group is None or not largest.numel():
        return largest
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    _rebase(sums, largest - overall)
    dist.all_reduce(sums, group=group)
    return overall


@dataclass(kw_only=True, slots=True, frozen=True)
class _Slope:
    """What the gradient of a logit depends on, per row [n]."""

    tokens: torch.Tensor
    shard: VocabShard
    log_normalizer: torch.Tensor
    entropy: torch.Tensor
    grad_log_probs: torch.Tensor
    grad_entropy: torch.Tensor | None

    def of(self, logits: torch.Tensor, rows: slice, columns: slice, buffer: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient [r, c] of a tile of logits, which are overwritten. `buffer` as in `_add_tile`."""
        outer = self.grad_log_probs[rows].unsqueeze(1)
        logits -= self.log_normalizer[rows].unsqueeze(1)
        if self.grad_entropy is None or buffer is None:
            slope = logits.exp_().mul_(-outer)
        else:
            # -p (outer + grad_entropy * (log p + H))
            slope = torch.exp(logits, out=buffer[: logits.numel()].view(logits.shape))
            inner = self.grad_entropy[rows].unsqueeze(1)
            # Two passes: on CPU faster than addcmul, which does not vectorise over broadcast operands.
            slope *= logits.mul_(-inner).sub_(outer + inner * self.entropy[rows].unsqueeze(1))
        column, held = self.shard.columns_of(self.tokens[rows], columns)
        return slope.scatter_add_(1, column, outer * held.unsqueeze(1))


def _gradients(
    tiles: LogitTiles, weight: torch.Tensor, slope: _Slope, *, wanted: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the rows' hidden states [n, H] (in the type of the logits) and of the weight."""
    grad_states = torch.zeros_like(tiles.states, dtype=tiles.dtype) if wanted[0] else None
    grad_weight = torch.zeros_like(weight) if wanted[1] else None
    buffer = None if slope.grad_entropy is None else tiles.new_buffer()
    for columns, part in tiles.columns():
        # Products of 16-bit tiles are summed over the rows in fp32 and rounded once.
        total = None if grad_weight is None else grad_weight[columns]
        if total is not None and total.dtype != tiles.dtype:
            total = torch.zeros_like(total, dtype=tiles.dtype)
        for rows in tiles.rows():
            tile = slope.of(tiles.logits(rows, part), rows, columns, buffer).to(part.dtype)
            if grad_states is not None:
                _add_product(grad_states[rows], tile, part)
            if total is not None:
                _add_product(total, tile.t(), tiles.states[rows])
        if grad_weight is not None and total is not None and total.dtype != grad_weight.dtype:
            grad_weight[columns] = total
    return grad_states, grad_weight


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, in place, the product in the type of its factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
