"""Discounted sums of what follows, within each sequence of a packed run of numbers.

Shapes: M numbers, B sequences, K slots of a block, C blocks.
"""

import math

import torch
from torch import Tensor

_CPU_CHUNK = 1 << 18
"""Numbers scanned at a time on a CPU, so that what is being worked on stays in its cache."""


def discounted_suffix_sums(values: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """Return y [M] with y_t = x_t + decay * y_(t+1) inside each sequence; y of a last token is x.

    A blocked scan: sequences are cut into blocks of K ~ sqrt(longest), all blocks are scanned side by side, then the
    blocks of a sequence are chained. About 3 sqrt(longest) vector operations, on CPU or GPU, in the dtype of `values`.

    Args:
        values: [M] float; offsets: [B+1] int64, both on one device.
    """
    if decay == 0 or not len(values):
        return values.clone()
    if values.device.type != "cpu":
        return _scan(values, offsets, decay)
    out = torch.empty_like(values)
    first, sequences = 0, len(offsets) - 1
    while first < sequences:
        # At least one sequence, then as many as fit.
        fitting = int(torch.searchsorted(offsets, offsets[first] + _CPU_CHUNK, right=True)) - 1
        last = min(max(fitting, first + 1), sequences)
        start, end = int(offsets[first]), int(offsets[last])
        out[start:end] = _scan(values[start:end], offsets[first : last + 1] - start, decay)
        first = last
    return out


def _scan(values: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """Scan a run of sequences at once; the arguments are those of `discounted_suffix_sums`."""
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    slots = 1 << max(0, math.isqrt(longest).bit_length() - 1)
    blocks = (lengths + slots - 1) // slots
    first_block = blocks.cumsum(0) - blocks
    # Each sequence starts a block; the rest of its last block is filled with zeros.
    cell = torch.repeat_interleave(first_block * slots - offsets[:-1], lengths)
    cell += torch.arange(len(values), device=values.device)
    padded = values.new_zeros(int(blocks.sum()) * slots)
    padded[cell] = values
    grid = padded.view(-1, slots).t().contiguous()  # [K, C]
    for slot in range(slots - 2, -1, -1):
        grid[slot].add_(grid[slot + 1], alpha=decay)
    carry = _chain_blocks(grid[0], first_block, blocks, decay**slots)
    for slot in range(slots):
        grid[slot].add_(carry, alpha=decay ** (slots - slot))
    return grid.t().reshape(-1)[cell]


def _chain_blocks(heads: Tensor, first_block: Tensor, blocks: Tensor, decay: float) -> Tensor:
    """Return for each block the scanned value at the first token of the block after it; 0 after a last block.

    Args:
        heads: [C] scanned value at the first token of each block, its own block only.
        first_block, blocks: [B] first block and number of blocks per sequence.
        decay: of a whole block.
    """
    carry = torch.zeros_like(heads)
    sizes, by_size = blocks.sort(descending=True)
    starts = first_block[by_size]
    largest = int(sizes[0])
    # Sequences with more than j blocks are a prefix of the sorted ones.
    prefix = torch.searchsorted(-sizes, -torch.arange(largest, device=sizes.device)).cpu().numpy()
    for block in range(largest - 2, -1, -1):
        after = starts[: int(prefix[block + 1])] + block + 1
        carry[after - 1] = heads[after] + decay * carry[after]
    return carry
