"""Megatron's optimizer with our learning-rate schedule and a refusal of non-finite steps.

The step number counts optimizer steps that were applied: the schedule, Adam's bias correction and checkpoints all go by
it. A step whose gradient is not finite is none: weights, state, step number and learning rate stay.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, OptimizerName
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


@dataclass(kw_only=True, slots=True, frozen=True)
class OwnedWeight:
    """A flat range of a weight that this rank steps, and the optimizer's tensors of it, each of as many elements."""

    parameter: torch.nn.Parameter
    """Of the model."""
    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    """State by torch's names, and `fp32_param`: the copy that is stepped where the weight has another type."""


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

    @property
    def kind(self) -> str:
        """What decides which state there is."""
        name = self.config.name.value
        return f"{name} with momentum" if self.config.name is OptimizerName.sgd and self.config.momentum else name

    def counters(self) -> dict[str, int]:
        """Return what is counted, equal on all ranks."""
        return {
            "step_number": self.step_number,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Have made so many steps: the state that they make is there and is to be filled (`owned`). Settings stay the
        configured ones."""
        self.step_number = counters["step_number"]
        self.skipped_steps = counters["skipped_steps"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]
        for part in self._parts():
            if self.step_number == 0:
                part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                if self.config.name is OptimizerName.adam and not isinstance(part.optimizer, torch.optim.AdamW):
                    group["step"] = self.step_number  # fused ones (Transformer Engine, apex) count once per group
                for weight in group["params"] if self.step_number else ():
                    self._make_state(part.optimizer, weight)

    def take_weights(self) -> None:
        """Go on from weights that were read into the model, where the optimizer steps copies of them."""
        self._megatron.reload_model_params()

    def _make_state(self, optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
        """Give a weight the state that it has after a step."""
        state = optimizer.state[weight]
        for name in self._state_names():
            if state.get(name) is None:
                state[name] = torch.zeros_like(weight)
        if isinstance(optimizer, torch.optim.AdamW):
            # Each its own: one that several share is advanced once for each, and Adam's bias correction silently wrong.
            state["step"] = torch.tensor(float(self.step_number))

    def _state_names(self) -> list[str]:
        """Return what the optimizer calls the tensors of a weight's shape that it keeps."""
        if self.config.name is OptimizerName.adam:
            return ["exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if self.config.momentum else []

    def owned(self) -> list["OwnedWeight"]:
        """Return what this rank steps, with the state of the steps so far."""
        return [
            OwnedWeight(
                parameter=parameter,
                start=start,
                stop=start + stepped.numel(),
                # In fp32 the model's own weights are stepped.
                tensors=({} if stepped.dtype == parameter.dtype else {"fp32_param": stepped})
                | {name: part.optimizer.state[stepped][name] for name in self._state_names() if self.step_number},
            )
            for part in self._parts()
            for parameter, stepped, start in _stepped_by(part)
        ]

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of this rank that only the optimizer has: its state and fp32 master weights."""
        tensors = [tensor.detach() for owned in self.owned() for tensor in owned.tensors.values()]
        for part in self._parts():
            tensors += [state["step"] for state in part.optimizer.state.values() if "step" in state]
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


def _stepped_by(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """Yield (parameter of the model, what a Megatron optimizer steps of it, place of its first element in it): the
    parameter itself, an fp32 copy, or a flat shard of either."""
    if isinstance(part, DistributedOptimizer):
        groups = [
            *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups),
            *zip(part.model_fp32_groups, part.shard_fp32_groups),
        ]
        for parameter, shard in (pair for parameters, shards in groups for pair in zip(parameters, shards)):
            yield parameter, shard, part._get_model_param_range_map(parameter)["param"].start
    elif isinstance(part, megatron_optimizer.Float16OptimizerWithFloat16Params):
        groups = [*zip(part.float16_groups, part.fp32_from_float16_groups)]
        groups += [(group, group) for group in part.fp32_from_fp32_groups]
        for parameter, copy in (pair for parameters, copies in groups for pair in zip(parameters, copies)):
            yield parameter, copy, 0
    else:
        for parameter in part.get_parameters():
            yield parameter, parameter, 0
