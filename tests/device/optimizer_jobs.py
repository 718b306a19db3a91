"""Jobs on Megatron's optimizers over gloo: a tiny linear model under its data-parallel wrapper."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class TwoMatrices(MegatronModule):
    """y = B A x."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(6, 4).to(config.params_dtype))
        self.second = torch.nn.Parameter(torch.randn(3, 6).to(config.params_dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.first.T @ self.second.T


def make(distributed: bool, bf16: bool) -> tuple[Any, Any]:
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=bf16, params_dtype=dtype)
    wrapper_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, wrapper_config, TwoMatrices(config))
    optimizer_config = OptimizerConfig(
        lr=0.01, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=1.0, weight_decay=0.0
    )
    return model, get_megatron_optimizer(optimizer_config, [model])


def step(model: Any, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 4, generator=generator).to(next(model.parameters()).dtype)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(inputs).float().square().mean().backward()
    model.finish_grad_sync()
    optimizer.step()


def weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().float().clone() for parameter in model.parameters()]


def train(*, distributed: bool, bf16: bool, steps: int) -> list[torch.Tensor]:
    """Weights after some steps."""
    model, optimizer = make(distributed, bf16)
    for seed in range(steps):
        step(model, optimizer, seed)
    return weights(model)


def adam_by_hand(*, steps: int) -> list[torch.Tensor]:
    """The same training in plain torch."""
    model = TwoMatrices(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for seed in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert dist.is_initialized() and math.isfinite(float(model.first.sum()))
    return weights(model)
