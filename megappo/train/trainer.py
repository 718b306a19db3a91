"""What actor, critic and a reward model in training have in common: one Megatron model and its optimizer.

Shapes: T input tokens of a micro-batch, H hidden features.

The loss of an optimizer step is a plain sum over the tokens of all micro-batches of all data-parallel ranks; each
token brings its own weight. Megatron averages by default: it divides the loss by the number of micro-batches, the
gradient by the data-parallel size, and multiplies by the context-parallel size. All three go by one switch, so none is
compensated for here: see `_sum_instead_of_average`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config

from megappo.batch.fields import BatchError
from megappo.batch.requests import MiniBatch
from megappo.batch.stages import Experience
from megappo.config.model import Fp8Recipe, ModelConfig
from megappo.config.optim import OptimConfig
from megappo.config.run import ActorConfig, CriticConfig
from megappo.device.backend import Backend
from megappo.models.build import Head
from megappo.models.description import ModelDescription
from megappo.observability.metrics import Metrics, maximum, mean, merge
from megappo.observability.phases import in_phase, phase
from megappo.train.checkpoint import TrainerCheckpoints
from megappo.train.offload import TrainerMemory
from megappo.train.optimizer import ModelOptimizer, StepOutcome
from megappo.train.packed_model import PackedModel
from megappo.train.packing import PackedMicroBatch

LossFunction = Callable[[torch.Tensor, int], tuple[torch.Tensor, Metrics]]
"""Model output of a micro-batch ([T, H] hidden states or [T] values), its number -> loss to sum, metrics to merge."""


class ModelTrainer(PackedModel):
    """One model on this rank that is trained."""

    chunks: list[DistributedDataParallel]

    def __init__(
        self,
        *,
        role: str,
        path: str,
        model: ModelConfig,
        training: ActorConfig | CriticConfig,
        head: Head,
        backend: Backend,
        seed: int,
    ) -> None:
        """Build the model with the weights in the Hugging Face folder `path`, and a fresh optimizer.

        Args:
            seed: of the first values of adapters.

        Raises:
            CapabilityError: the layout asks for what the model cannot do.
        """
        super().__init__(path=path, model=model, parallelism=training.parallelism, lora=training.lora)
        self.role = role
        optim = training.optim
        chunks = self._build(head, backend, seed=seed)
        self.chunks = [_wrap(chunk, optim, first=index == 0) for index, chunk in enumerate(chunks)]
        _let_gradients_overlap(self.chunks, optim)
        self.optimizer = ModelOptimizer(optim, self.chunks, dtype=model.dtype)
        self.memory = TrainerMemory(training.offload, self.chunks, self.optimizer, backend=backend)
        description = self._describe(model, training)
        self.checkpoints = TrainerCheckpoints(
            self.chunks, self.optimizer, description, seed=seed, keeps_histories=model.fp8 is Fp8Recipe.delayed
        )

    def _describe(self, model: ModelConfig, training: ActorConfig | CriticConfig) -> ModelDescription:
        """Return what a checkpoint of this trainer is of."""
        return ModelDescription.of(
            self.role,
            self.architecture,
            dtype=model.dtype,
            parallelism=self.parallelism,
            world_size=dist.get_world_size(),
            lora=training.lora,
            optimizer=self.optimizer.kind,
        )

    @in_phase("save")
    def begin_save(self, folder: str) -> None:
        """Copy the state and begin to write it into an existing folder; `checkpoints.finish_save` ends it.

        Raises:
            CheckpointError: on every rank, when one of them cannot, or a save is under way.
        """
        self.memory.require_all()
        self.checkpoints.begin_save(folder)

    @in_phase("load")
    def load(self, folder: str) -> None:
        """Continue from a checkpoint of the same model and optimizer, of any layout.

        Raises:
            CheckpointError: on every rank, and nothing is changed: another model, or a file is missing or damaged.
        """
        self.memory.require_all()
        self.checkpoints.load(folder)

    def _predicted(self, micro_batch: PackedMicroBatch, values: np.ndarray | None) -> torch.Tensor | None:
        """Return a per-token field [N] of the batch at the predicted tokens, [n] on the model's device."""
        return None if values is None else self._tensor(values[micro_batch.token_index])

    def _run_forward_backward(self, packed: list[PackedMicroBatch], loss: LossFunction) -> list[tuple[float, Metrics]]:
        """Add the gradient of the summed loss to the gradient buffers, then sum these over the data-parallel ranks.

        Returns:
            (loss, metrics) of every micro-batch; an empty list before the last stage.
        """
        for chunk in self.chunks:
            chunk.train()

        def summed(output: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor, tuple[float, Metrics]]:
            value, metrics = loss(output, index)
            # Megatron's place for a number of tokens to divide by; weights are in the loss already.
            return value, torch.zeros((), dtype=torch.int, device=value.device), (value.item(), metrics)

        return self._schedule(packed, summed, forward_only=False)

    def _optimize(self, steps: Sequence[tuple[list[PackedMicroBatch], LossFunction]], *, epochs: int) -> Metrics:
        """Take one optimizer step per entry of `steps`, in order, `epochs` times over. See `_step_metrics`."""
        self.memory.require_all()
        parts: list[Metrics] = []
        losses: list[float] = []
        outcomes: list[StepOutcome] = []
        for _ in range(epochs):
            for number, (packed, loss) in enumerate(steps):
                with phase("mini_batch", number=number):
                    self.optimizer.zero_grad()
                    found = self._run_forward_backward(packed, loss)
                    losses.append(sum(value for value, _ in found))
                    parts += [metrics for _, metrics in found]
                    with phase("optimizer_step"):
                        outcomes.append(self.optimizer.step())
        self.optimizer.gather_weights()
        if not self.is_output_rank:
            return {}
        return merge([*parts, self._step_metrics(losses, outcomes)])

    def _step_metrics(self, losses: list[float], outcomes: list[StepOutcome]) -> Metrics:
        """Metrics of the optimizer steps of one update.

        - `loss/mean`: the loss (sum over all tokens of all ranks), mean over optimizer steps, skipped ones included.
        - `grad_norm`: norm before clipping, mean over the steps that were applied; absent when none was.
        - `lr`: learning rate, mean over optimizer steps.
        - `skipped_steps`: steps skipped since the start of the run because their gradient was not finite.
        - `first_step/loss`, `first_step/grad_norm`: of the first step, skipped or not. They depend on the weights
          before the update and on no optimizer state, so a replay can repeat them.

        Args:
            losses: of each step, this rank's part.
        """
        applied = [outcome.grad_norm for outcome in outcomes if outcome.applied]
        data_ranks = parallel_state.get_data_parallel_world_size()
        return {
            # A rank has a part of the sum, and all ranks share the steps: merging them gives sum / steps.
            f"{self.role}/loss/mean": mean(sum(losses), len(outcomes) / data_ranks),
            f"{self.role}/grad_norm": mean(sum(applied), len(applied)),
            f"{self.role}/lr": mean(sum(outcome.learning_rate for outcome in outcomes), len(outcomes)),
            f"{self.role}/skipped_steps": maximum(self.optimizer.skipped_steps),
            f"{self.role}/first_step/loss": mean(sum(losses[:1]), len(outcomes[:1]) / data_ranks),
            f"{self.role}/first_step/grad_norm": mean(sum(o.grad_norm for o in outcomes[:1]), len(outcomes[:1])),
        }


def token_weights(batch: Experience, mini_batch: MiniBatch, micro_batch: PackedMicroBatch) -> np.ndarray:
    """Return the weight in the loss of each predicted token of the micro-batch, [n] float32.

    Raises:
        BatchError: the mini-batch gives no weight for a sequence that has loss tokens.
    """
    ids = batch.sequence_ids[micro_batch.sequence_index[micro_batch.target_offsets[:-1]]].tolist()
    missing = [sequence for sequence in ids if sequence not in mini_batch.loss_weights]
    if missing:
        raise BatchError(f"loss_weights lacks sequence ids {missing}, which have tokens on the loss mask")
    weights = np.array([mini_batch.loss_weights[sequence] for sequence in ids], np.float32)
    return np.repeat(weights, np.diff(micro_batch.target_offsets))


def _wrap(chunk: MegatronModule, optim: OptimConfig, *, first: bool) -> DistributedDataParallel:
    config = get_model_config(chunk)
    _sum_instead_of_average(config)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optim.distributed,
        overlap_grad_reduce=optim.overlap_grad_reduce,
        overlap_param_gather=optim.overlap_param_gather,
        bucket_size=optim.overlap_bucket_params,
    )
    return DistributedDataParallel(config, options, chunk, disable_bucketing=not first)


def _let_gradients_overlap(chunks: Sequence[DistributedDataParallel], optim: OptimConfig) -> None:
    """Tell the schedules which micro-batches only add to the gradient (schedules.py:588). Without this the sum over the
    data-parallel ranks would start once as many gradients are there as in the first step ever
    (param_and_grad_buffer.py:559): too early or never where the number of micro-batches changes."""
    if optim.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        get_model_config(chunks[0]).no_sync_func = functions if len(functions) > 1 else functions[0]  # type: ignore[assignment]


def _sum_instead_of_average(config: Any) -> None:
    """Make Megatron sum the loss over micro-batches and the gradient over data-parallel ranks.

    With `calculate_per_token_loss`, schedules.py:259 neither divides the loss by the number of micro-batches nor
    multiplies it by the context-parallel size, and distributed_data_parallel.py:254 does not divide the gradient by
    the data-parallel size. What is left, finalize_model_grads dividing by a total number of tokens, happens only when
    it is given one. Must be set before the model is wrapped. (An auxiliary loss of a mixture of experts would be
    scaled by its number of tokens under this switch, moe/router.py:456.)
    """
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = lambda chunks, _, **groups: finalize_model_grads(chunks, None, **groups)
