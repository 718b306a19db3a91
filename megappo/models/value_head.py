"""The head of the critic: one value per token."""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Linear):
    """Replicated hidden -> 1 layer with the calling convention of Megatron's output layer. Starts at zero."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        torch.nn.init.zeros_(self.weight)
        self.sequence_parallel = config.sequence_parallel
        # Each rank sees its part of the tokens: the gradient is a sum over ranks, as for the norms.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return values [T, 1, 1] float32 of all T tokens on every tensor-parallel rank, and no bias."""
        values = super().forward(input).float()
        if self.sequence_parallel:
            # Every rank goes on with the whole [T, 1, 1] and computes the same loss, so backward takes the rank's own
            # part; the default would sum the equal gradients of all ranks.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
