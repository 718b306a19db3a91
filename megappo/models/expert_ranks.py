"""Ranks that meet in the experts of a model."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def most_of_expert_ranks(number: int, device: torch.device) -> int:
    """Return the largest of the numbers that the data-parallel ranks give; all ranks of the group call it together.

    The experts of a layer are computed by all data-parallel ranks over which they are spread together, so these go
    through the layers equally often: a rank with fewer micro-batches than another would leave it waiting. Where no
    rank shares experts with another the number is returned at once.
    """
    replicas: Any = parallel_state.get_data_parallel_group()  # Any: Megatron's groups may be numbers
    experts: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
    if experts.size() == 1 or replicas.size() == 1:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=replicas)
    return int(largest)
