"""What stands where Megatron has the output projection: hidden states go on as they are."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class UnprojectedOutput(torch.nn.Module):
    """Holds the output weight of a Megatron output layer, with its calling convention, and does not apply it.

    The projection is part of the log-probs (`megappo.train.log_probs`), each rank using its own columns. Being called
    still matters: the gradients of the ranks are summed here, and where parameters are gathered while the forward pass
    runs, Megatron waits for those of a module before its forward (distributed_data_parallel.py:384).
    """

    def __init__(self, projection: ColumnParallelLinear) -> None:
        """Take over the weight (None where the token embedding is used) with its marks."""
        super().__init__()
        self.weight = projection.weight
        self.sequence_parallel = projection.sequence_parallel

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states [T, 1, hidden] of all T tokens on every tensor-parallel rank, and no bias."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(input), None
