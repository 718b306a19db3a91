"""Discounted sums of what follows, within each sequence of a packed run of numbers.

Shapes: M numbers, B sequences, K slots of a block.
"""

import math

import torch
from torch import Tensor


def discounted_suffix_sums(values: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """Return y [M] with y_t = x_t + decay * y_(t+1) inside each sequence; y of a last token is x.

    A blocked scan: sequences are cut into blocks of K ~ sqrt(longest), all blocks are scanned side by side, then the
    blocks of a sequence are chained. About 3 sqrt(longest) vector operations, on CPU or GPU, in the dtype of `values`.

    Args:
        values: [M] float; offsets: [B+1] int64, both on one device.
    """
    lengths = offsets.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest <= 1 or decay == 0:
        return values.clone()
    slots = max(1, math.isqrt(longest))
    blocks = (lengths + slots - 1) // slots
    first_block = blocks.cumsum(0) - blocks
    sequence = torch.repeat_interleave(lengths)
    position = torch.arange(len(values), device=values.device) - offsets[sequence]
    cell = (position % slots) * int(blocks.sum()) + first_block[sequence] + position // slots
    grid = values.new_zeros(slots, int(blocks.sum()))
    grid.view(-1)[cell] = values
    for slot in range(slots - 2, -1, -1):
        grid[slot].add_(grid[slot + 1], alpha=decay)
    carry = _chain_blocks(grid[0], first_block, blocks, decay**slots)
    for slot in range(slots):
        grid[slot].add_(carry, alpha=decay ** (slots - slot))
    return grid.view(-1)[cell]


def _chain_blocks(heads: Tensor, first_block: Tensor, blocks: Tensor, decay: float) -> Tensor:
    """Return for each block the scanned value at the first token of the block after it; 0 after a last block.

    Args:
        heads: [blocks in all] scanned value at the first token of each block, its own block only.
        first_block, blocks: [B] first block and number of blocks per sequence.
        decay: of a whole block.
    """
    carry = torch.zeros_like(heads)
    by_size = blocks.argsort(descending=True)
    starts, sizes = first_block[by_size], blocks[by_size]
    largest = int(sizes[0])
    # Sequences with more than j blocks are a prefix of the sorted ones.
    prefix = torch.searchsorted(-sizes, -torch.arange(largest, device=sizes.device)).cpu().numpy()
    for block in range(largest - 2, -1, -1):
        after = starts[: int(prefix[block + 1])] + block + 1
        carry[after - 1] = heads[after] + decay * carry[after]
    return carry
