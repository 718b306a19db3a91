"""Megatron's optimizer with our learning-rate schedule and a refusal of non-finite steps.

The step number counts optimizer steps that were applied: the schedule, Adam's bias correction and checkpoints all go by
it. A step whose gradient is not finite is none: weights, state, step number and learning rate stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer

from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.errors import NonFiniteError
from megappo.train.schedule import learning_rate_at
from megappo.train.weight_decay import weight_decay_overrides


@dataclass(kw_only=True, slots=True, frozen=True)
class StepOutcome:
    """What one optimizer step did."""

    applied: bool
    """False: the gradient was not finite; weights, optimizer state and step number are as before."""
    grad_norm: float
    """Norm of the whole gradient over all ranks, before clipping."""
    learning_rate: float


class ModelOptimizer:
    """The optimizer of one model: all ranks that hold a part of it call each method together."""

    def __init__(self, config: OptimConfig, chunks: Sequence[DistributedDataParallel], *, dtype: Dtype) -> None:
        self.config = config
        self.step_number = 0
        """Steps applied so far."""
        self.skipped_steps = 0
        """Non-finite steps since the start of the run."""
        self._skipped_in_a_row = 0
        self._chunks = chunks
        self._megatron: Any = get_megatron_optimizer(  # Any: Megatron's ChainedOptimizer is untyped
            OptimizerConfig(
                optimizer=config.name.value,
                lr=config.lr,
                min_lr=config.min_lr,
                # Megatron's rule is weight_decay * wd_mult of the group: here the multiplier is the weight decay.
                weight_decay=1.0,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                sgd_momentum=config.momentum,
                clip_grad=config.clip_grad,
                bf16=dtype is Dtype.bfloat16,
                params_dtype=getattr(torch, dtype.value),
                use_distributed_optimizer=config.distributed,
                overlap_param_gather=config.overlap_param_gather,
            ),
            list(chunks),
            config_overrides=weight_decay_overrides(config, chunks),
        )
        self._weight_decays = [group["wd_mult"] for group in self._megatron.param_groups]
        self._apply_settings()

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self) -> StepOutcome:
        """Clip the gradient and apply one step, unless the gradient is not finite.

        With `overlap_param_gather` the weights are whole after the next forward pass or `gather_weights`.

        Raises:
            NonFiniteError: this was the `max_skipped_steps`-th step in a row that could not be applied.
        """
        rate = learning_rate_at(self.config, self.step_number + 1)
        # Megatron looks for non-finite gradients only where it scales an fp16 loss, so the norm is checked here.
        self._megatron.prepare_grads()
        grad_norm = float(self._megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            self._skip(grad_norm)
            return StepOutcome(applied=False, grad_norm=grad_norm, learning_rate=rate)
        if self.config.clip_grad > 0:
            parameters = [parameter for part in self._parts() for parameter in part.get_parameters()]
            megatron_optimizer.clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, grad_norm)
        for group in self._megatron.param_groups:
            group["lr"] = rate
        self._megatron.step_with_ready_grads()
        self.step_number += 1
        self._skipped_in_a_row = 0
        return StepOutcome(applied=True, grad_norm=grad_norm, learning_rate=rate)

    def gather_weights(self) -> None:
        """Make the weights of the last step whole on every rank, for readers other than a forward pass."""
        if self.config.overlap_param_gather:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def _skip(self, grad_norm: float) -> None:
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.config.max_skipped_steps:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} optimizer steps in a row were skipped, the last with gradient norm "
                f"{grad_norm}, after {self.step_number} applied steps (optim.max_skipped_steps="
                f"{self.config.max_skipped_steps}; lower optim.lr, or look at rewards and log-probs of the last step)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: what a rank in the same place of the same layout continues from."""
        return {
            "step_number": self.step_number,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "parts": [
                {"optimizer": part.optimizer.state_dict(), "main_weights": _weights_of(part)} for part in self._parts()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the model's own weights are loaded apart. Settings are the configured ones."""
        self.step_number = state["step_number"]
        self.skipped_steps = state["skipped_steps"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        for part, saved in zip(self._parts(), state["parts"]):
            part.optimizer.load_state_dict(saved["optimizer"])
            # A step tensor shared by several parameters would be advanced once for each of them, which makes Adam's
            # bias correction silently wrong.
            for parameter_state in part.optimizer.state.values():
                if isinstance(parameter_state.get("step"), torch.Tensor):
                    parameter_state["step"] = parameter_state["step"].clone()
            with torch.no_grad():
                for weight, saved_weight in zip(_weights_of(part), saved["main_weights"]):
                    weight.copy_(saved_weight)
        self._apply_settings()

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of this rank that only the optimizer has: its state and fp32 master weights."""
        tensors: list[torch.Tensor] = []
        for part in self._parts():
            tensors += _weights_of(part)
            for state in part.optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return tensors

    def _apply_settings(self) -> None:
        """Give the parameter groups their settings, which torch takes from a loaded state otherwise."""
        for group, weight_decay in zip(self._megatron.param_groups, self._weight_decays, strict=True):
            group["wd_mult"] = group["weight_decay"] = weight_decay
            if "betas" in group:
                group["betas"] = (self.config.beta1, self.config.beta2)
                group["eps"] = self.config.eps
            else:
                group["momentum"] = self.config.momentum

    def _parts(self) -> list[Any]:
        """Return Megatron's optimizers on this rank that own parameters: dense ones, then experts."""
        return [part for part in self._megatron.chained_optimizers if not part.is_stub_optimizer]


def _weights_of(part: Any) -> list[torch.Tensor]:
    """Return the weights that a Megatron optimizer steps where these are not the model's own: fp32 copies, shards."""
    if isinstance(part, megatron_optimizer.FP32Optimizer):
        return []
    return [parameter.detach() for parameter in part.get_parameters()]
