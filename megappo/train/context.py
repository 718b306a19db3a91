"""Per-token results of a micro-batch whose tokens are split over context-parallel ranks.

Shapes: n tokens that the micro-batch predicts, m of them from rows of this rank.

Every context-parallel rank gathers the results of all, computes the whole loss, and sends the gradient back into its
own m results only. The gradients of the weights, which Megatron sums over the context-parallel ranks as it does over
the data-parallel ones, then are those of the whole micro-batch: nothing is divided or counted twice.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.models.context import ContextShare, gathered_rows
from megappo.train.log_probs import TokenStatistics


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenSplit:
    """Which of the n predicted tokens this rank computes, and where all of them lie after a gather."""

    own: torch.Tensor
    """[m] int64 which of the n tokens these are, ascending."""
    order: torch.Tensor
    """[n] int64 place of every token when each rank's results, `width` of them, lie one behind the other."""
    width: int
    """Most tokens that one rank computes."""


def split_tokens(
    rows: np.ndarray, lengths: list[int], *, share: ContextShare, device: torch.device
) -> tuple[np.ndarray, TokenSplit]:
    """Say who computes what of the tokens that rows [n] of the whole micro-batch predict.

    Args:
        lengths: of the whole sequences, filler included.

    Returns:
        The rows [m] of this rank's input that predict its tokens, and the split.
    """
    place = gathered_rows(lengths, share.size).numpy()[rows]
    holder, row = np.divmod(place, sum(lengths) // share.size)
    width = int(np.bincount(holder, minlength=1).max())
    order = np.empty(len(rows), np.int64)
    for rank in range(share.size):
        computed = np.flatnonzero(holder == rank)
        order[computed] = rank * width + np.arange(len(computed))
    own = np.flatnonzero(holder == share.rank)
    own_here, order_here = (torch.from_numpy(array).to(device) for array in (own, order))
    return row[own], TokenSplit(own=own_here, order=order_here, width=width)


def gather_tokens(values: torch.Tensor, split: TokenSplit) -> torch.Tensor:
    """Results [m] of this rank -> results [n] of all context-parallel ranks, in the order of the tokens."""
    return _GatherTokens.apply(values, split)


def gather_statistics(statistics: TokenStatistics, split: TokenSplit) -> TokenStatistics:
    """The same for all statistics."""
    entropy, squares = statistics.entropy, statistics.sum_squared_probs
    return TokenStatistics(
        log_probs=gather_tokens(statistics.log_probs, split),
        entropy=None if entropy is None else gather_tokens(entropy, split),
        sum_squared_probs=None if squares is None else gather_tokens(squares, split),
    )


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, split: TokenSplit) -> torch.Tensor:  # Any: autograd's context
        ctx.split = split
        padded = values.new_zeros(split.width)
        padded[: len(values)] = values
        group: Any = parallel_state.get_context_parallel_group()  # Any: Megatron types it as a number, too
        gathered = values.new_empty(split.width * group.size())
        if split.width:
            dist.all_gather_into_tensor(gathered, padded, group=group)
        return gathered.index_select(0, split.order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient.index_select(0, ctx.split.own), None
