"""The RMS norm of the local layer spec."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight carries the flag for sequence parallelism.

    Under it every tensor-parallel rank sees its part of the tokens only, and Megatron sums the gradients of flagged
    parameters (distributed/finalize_model_grads.py). Its own WrappedTorchNorm refuses sequence parallelism
    (transformer/torch_norm.py:49).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
