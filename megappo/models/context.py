"""Which tokens a context-parallel rank holds, and how attention brings whole sequences together.

Shapes: T tokens of a packed micro-batch (all ranks), R context-parallel ranks, H query and G key/value heads on this
tensor-parallel rank, D head size.

The split is Megatron's and Transformer Engine's: every sequence is cut into 2 R chunks of one length, and rank r holds
chunks r and 2 R - 1 - r of each, sequence after sequence. Lengths are multiples of 2 R (filler at the end, which
causality hides from the real tokens).

The local layer spec exchanges heads for tokens before attention and back after it (Ulysses, arXiv:2309.14509): each
rank then has all tokens of H / R heads, and attention runs as it does without context parallelism, with the same
result. Key/value heads are repeated where there are fewer of them than the ranks want.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all


@dataclass(kw_only=True, slots=True, frozen=True)
class ContextShare:
    """This rank's place among the ranks that share the tokens of a micro-batch."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_this_rank(cls) -> "ContextShare":
        """Return the share in Megatron's context-parallel group."""
        return cls(
            rank=parallel_state.get_context_parallel_rank(), size=parallel_state.get_context_parallel_world_size()
        )

    @property
    def multiple(self) -> int:
        """What divides the length of every sequence."""
        return 2 * self.size if self.size > 1 else 1


WHOLE = ContextShare()
"""No context parallelism."""


def held_positions(lengths: Sequence[int], share: ContextShare) -> torch.Tensor:
    """Return the packed positions that a rank holds, in its order, [T / R] int64.

    Args:
        lengths: of the sequences of the micro-batch, multiples of `share.multiple`.
    """
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    if share.size == 1:
        return torch.arange(int(length.sum()))
    chunk = length // (2 * share.size)
    assert bool((chunk * 2 * share.size == length).all()), "lengths must be multiples of twice the context size"
    first = torch.stack([start + chunk * share.rank, start + chunk * (2 * share.size - 1 - share.rank)], 1).flatten()
    counts = chunk.repeat_interleave(2)
    before = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (first - before).repeat_interleave(counts)


def gathered_rows(lengths: Sequence[int], size: int) -> torch.Tensor:
    """Return where each packed token lies when the shares of all ranks are put one behind the other, [T] int64."""
    held = torch.cat([held_positions(lengths, ContextShare(rank=rank, size=size)) for rank in range(size)])
    rows = torch.empty_like(held)
    rows[held] = torch.arange(len(held))
    return rows


def heads_to_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All heads of the own tokens -> all tokens (in rank order) of the own heads. One exchange for all three.

    Returns:
        query [T, H / R, D], key and value [T, G' / R, D] with G' = G times the repetitions that R asks for.
    """
    size = group.size()
    repeats = size // math.gcd(key.shape[1], size)
    tensors = [query, *(tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor for tensor in (key, value))]
    # [T / R, heads, D] -> [R, T / R, heads / R, D]: block r goes to rank r.
    blocks = [tensor.unflatten(1, (size, -1)).transpose(0, 1) for tensor in tensors]
    received = all_to_all(group, torch.cat(blocks, 2)).flatten(0, 1)
    heads = [block.shape[2] for block in blocks]
    own_query, own_key, own_value = received.split(heads, 1)
    return own_query, own_key, own_value


def tokens_to_heads(output: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """All tokens (in rank order) of the own heads, [T, H / R, D] -> all heads of the own tokens, [T / R, H, D]."""
    size = group.size()
    received = all_to_all(group, output.unflatten(0, (size, -1)))  # [R, T / R, H / R, D]: block r holds heads of r
    return received.transpose(0, 1).flatten(1, 2)
