"""The router of the local layer spec."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter


class Float32Router(TopKRouter):
    """Megatron's router with its logits in float32, whatever the dtype of the model.

    Megatron's own product calls a function that exists only where Transformer Engine is installed
    (moe/moe_utils.py:1192: a NameError without it).
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., experts] float32 of hidden states [..., hidden]."""
        return F.linear(input.float(), self.weight.float())
