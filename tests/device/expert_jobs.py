"""What mixtures of experts need of Megatron over gloo, with its own code in the place of a patch."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher


def outcome_of_splits(*, patched: bool) -> str:
    """Exchange tokens by split sizes as the token dispatcher moves them to the host."""
    move = token_dispatcher.maybe_move_tensor_to_cpu
    move = move if patched else move.megappo_original  # type: ignore[attr-defined]
    sizes = move(torch.tensor([1, 1]), as_numpy=True)
    tokens, received = torch.arange(2.0), torch.empty(2)
    try:
        dist.all_to_all_single(received, tokens, sizes, sizes)
    except TypeError as error:
        return f"TypeError: {error}"
    assert received.tolist() == [dist.get_rank()] * 2
    return "works"


def outcome_of_gathers(*, patched: bool) -> str:
    """Gather 1 row of the first rank and 3 of the second, and sum them back."""
    names = ("_gather_along_first_dim", "_reduce_scatter_along_first_dim")
    gather, scatter = (_function(mappings, name, patched) for name in names)
    rank = dist.get_rank()
    own = torch.full((1 + 2 * rank, 2), float(rank))
    try:
        gathered = gather(own, dist.group.WORLD, [1, 3])
        summed = scatter(gathered, dist.group.WORLD, [1, 3])
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    assert torch.equal(gathered, torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    assert torch.equal(summed, 2 * own)
    return "works"


def _function(module: ModuleType, name: str, patched: bool) -> Any:  # Any: Megatron's functions
    function = getattr(module, name)
    return function if patched else function.megappo_original
