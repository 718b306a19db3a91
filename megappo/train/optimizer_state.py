"""State of an optimizer as parts of global tensors, cut as the weights are and, by a distributed optimizer, once more.

Megatron's own form of it for any layout (`fully_reshardable`, distrib_optimizer.py:1404) gathers whole tensors on one
rank and has that rank write them. Here each rank stores the piece that it steps: a flat range of a weight is at most a
part of a row, whole rows and a part of a row, each a block of the global tensor. Nothing is gathered, all ranks write,
and a checkpoint tells nothing of whether the optimizer was distributed.

Keys: `optimizer.state.<name>.<key of the weight>`; names are `exp_avg` and `exp_avg_sq`, or `momentum_buffer`, and
`fp32_param` where the optimizer steps a copy of the weight. Rows of a padded vocabulary have none: they stay zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule

from megappo.models.sharded_state import WeightPart, weight_parts
from megappo.train.optimizer import ModelOptimizer


@dataclass(kw_only=True, slots=True, frozen=True)
class Block:
    """A rectangle of a part, of consecutive elements."""

    start: int
    """First element, counted from that of the part."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Of its first element within the part."""


def sharded_optimizer_state(optimizer: ModelOptimizer, chunks: Sequence[MegatronModule]) -> ShardedStateDict:
    """Return this rank's pieces of all tensors of the optimizer's state; the tensors are views of it."""
    parts: dict[torch.nn.Parameter, list[WeightPart]] = {}
    for part in weight_parts(chunks):
        parts.setdefault(part.parameter, []).append(part)
    pieces: ShardedStateDict = {}
    for owned in optimizer.owned():
        data_is_cut = optimizer.config.distributed
        for part in parts[owned.parameter]:
            first = part.first_row * prod(part.parameter.shape[1:])
            for block in blocks_of(part, owned.start - first, owned.stop - first):
                start = first + block.start - owned.start
                offset = [sum(pair) for pair in zip(part.global_offset, block.offset)]
                for name, tensor in owned.tensors.items():
                    key = f"optimizer.state.{name}.{part.key}"
                    data = tensor.detach().view(-1)[start : start + prod(block.shape)].view(block.shape)
                    piece = part.sharded(data, key=key, offset=offset, data_is_cut=data_is_cut)
                    pieces[f"{key} {offset}"] = piece
    return pieces


def blocks_of(part: WeightPart, start: int, stop: int) -> Iterator[Block]:
    """Yield the blocks that elements `start` up to `stop` of a part consist of (counted from its first; those that lie
    outside are left out)."""
    row = prod(part.parameter.shape[1:])
    start, stop = max(start, 0), min(stop, part.num_rows * row)
    if part.parameter.dim() == 1:
        if start < stop:
            yield Block(start=start, shape=(stop - start,), offset=(start,))
        return
    while start < stop:
        number, column = divmod(start, row)
        if column or stop - start < row:
            width = min(row - column, stop - start)
            yield Block(start=start, shape=(1, width), offset=(number, column))
            start += width
        else:
            rows = (stop - start) // row
            yield Block(start=start, shape=(rows, row), offset=(number, 0))
            start += rows * row
