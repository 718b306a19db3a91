"""Jobs about adapters; each runs on every rank."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megappo.batch.fields import BatchError
from megappo.config.lora import LoraConfig
from megappo.config.memory import OffloadConfig, RecomputeConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.errors import CheckpointError
from megappo.models.lora import adapter_parameters
from megappo.models.parameters import mapped_parameters
from megappo.observability.metrics import values
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.trainer import ModelTrainer
from tests.train.batches import MicroBatches, make_experience, request_of, rollouts_of
from tests.train.checkpoint_jobs import load_whole, save_whole, stored_tensors
from tests.train.jobs import RankResult, complete_state, run_config, same, weights_now
from tests.train.training_jobs import emptied, own_part

Tensors = dict[str, torch.Tensor]


@dataclass
class AdapterResult(RankResult):
    """What one rank gave back; gradients and weights are its own parts, by PEFT's names."""

    gradient_elements: int = 0
    """Of the gradient buffers."""
    merged: Tensors | None = None
    """This stage's export after the last step."""
    frozen: Tensors | None = None
    """This stage's export with all adapters at zero, after the last step."""
    reference: list[np.ndarray] | None = None
    """Log-probs under the reference policy, before and after the steps (actor, output rank)."""
    without: np.ndarray | None = None
    """Log-probs of the policy once its adapters are at zero (as above)."""


def lora_config(folder: str, layout: ParallelismConfig, optim: OptimConfig, lora: LoraConfig | None) -> RunConfig:
    config = run_config(folder, layout, optim)
    config.actor.lora = config.critic.lora = lora
    return config


def trained_parameters(trainer: ModelTrainer) -> dict[str, torch.nn.Parameter]:
    """Adapters and value head of this rank, by PEFT's names."""
    found: dict[str, torch.nn.Parameter] = {}
    for chunk in trainer.chunks:
        found |= {name: parameter for parameter, name in adapter_parameters(chunk)}
        found |= {mapped.hugging_face[0]: item for item, mapped in mapped_parameters(chunk) if item.requires_grad}
    return found


def part_of(whole: torch.Tensor, shape: torch.Size, rank: int) -> torch.Tensor:
    """The tensor-parallel rank's part of a factor: of the dimension in which its shape is smaller."""
    for dim in (0, 1):
        if whole.shape[dim] != shape[dim]:
            whole = whole.narrow(dim, rank * shape[dim], shape[dim])
    return whole


@torch.no_grad()
def set_adapters(trainer: ModelTrainer, factors: Tensors) -> None:
    """Give the adapters the parts of whole factors."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in trained_parameters(trainer).items():
        if name in factors:
            parameter.copy_(part_of(factors[name], parameter.shape, rank))


def make_trainer(role: str, config: RunConfig) -> Any:
    return (ActorTrainer if role == "actor" else CriticTrainer)(config, backend=CPU)


def train_adapters(
    role: str,
    folder: str,
    layout: ParallelismConfig,
    optim: OptimConfig,
    deal: list[MicroBatches],
    lora: LoraConfig,
    factors: Tensors,
    steps: int,
) -> AdapterResult:
    """A forward pass, steps on this data rank's sequences, and what the trainer then gives away."""
    trainer = make_trainer(role, lora_config(folder, layout, optim, lora))
    set_adapters(trainer, factors)
    experience, micro_batches = own_part(deal)
    batch, request = rollouts_of(experience), request_of(make_experience(), micro_batches)

    def log_probs(*, reference: bool) -> Any:
        fields, _ = trainer.compute_log_probs(batch, micro_batches, reference=reference)
        return None if fields is None else fields.log_probs

    reference = [log_probs(reference=True)] if role == "actor" else []
    if role == "actor":
        numbers = log_probs(reference=False)
    else:
        numbers, _ = trainer.compute_values(batch, micro_batches)
    metrics = trainer.update(experience, request)
    gradients = {name: item.main_grad.clone() for name, item in trained_parameters(trainer).items()}  # type: ignore[attr-defined]
    trainer.update(experience, replace(request, epochs=steps - 1))
    weights = {name: item.detach().clone() for name, item in trained_parameters(trainer).items()}
    merged = weights_now(trainer)
    reference += [log_probs(reference=True)] if role == "actor" else []
    set_adapters(trainer, {name: torch.zeros_like(whole) for name, whole in factors.items()})
    without = log_probs(reference=False) if role == "actor" else None
    return AdapterResult(
        data_rank=parallel_state.get_data_parallel_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        numbers=numbers,
        metrics={name: (stat.total, stat.count) for name, stat in metrics.items()},
        gradients=gradients,
        weights=weights,
        gradient_elements=sum(buffer.grad_data.numel() for chunk in trainer.chunks for buffer in chunk.buffers),
        merged=merged,
        frozen=weights_now(trainer),
        reference=[field.values for field in reference if field is not None],
        without=None if without is None else without.values,
    )


def switch_off_and_fail(folder: str, lora: LoraConfig, factors: Tensors) -> dict[str, Any]:
    """Log-probs before and after a pass of the reference that raises."""
    trainer = make_trainer("actor", lora_config(folder, ParallelismConfig(), OptimConfig(), lora))
    set_adapters(trainer, factors)
    batch = rollouts_of(make_experience())
    ids = batch.sequence_ids.tolist()

    def log_probs(**options: bool) -> np.ndarray:
        return trainer.compute_log_probs(batch, [ids], **options)[0].log_probs.values

    before = log_probs()
    message = ""
    try:
        trainer.compute_log_probs(batch, [ids[1:]], reference=True)
    except BatchError as error:
        message = str(error)
    return {"before": before, "after": log_probs(), "reference": log_probs(reference=True), "error": message}


def recomputed_gradients(
    folder: str, lora: LoraConfig, factors: Tensors, settings: list[RecomputeConfig]
) -> list[Tensors]:
    """The gradient of one step, per setting."""
    results = []
    for recompute in settings:
        config = lora_config(folder, ParallelismConfig(), OptimConfig(), lora)
        config.model.recompute = recompute
        trainer = make_trainer("actor", config)
        set_adapters(trainer, factors)
        experience = make_experience()
        trainer.update(experience, request_of(experience, [experience.sequence_ids.tolist()]))
        results.append({name: item.main_grad.clone() for name, item in trained_parameters(trainer).items()})  # type: ignore[attr-defined]
    return results


def resume_adapters(
    folder: str, other: str, layout: ParallelismConfig, optim: OptimConfig, lora: LoraConfig, checkpoint: str
) -> dict[str, Any]:
    """Train, save, go on; the same from the checkpoint; then load it where it does not fit."""
    config = lora_config(folder, layout, optim, lora)
    experience = make_experience()
    request = request_of(experience, [experience.sequence_ids.tolist()])
    first = make_trainer("actor", config)
    first.update(experience, request)
    save_whole(first, checkpoint)
    first.update(experience, request)
    second = make_trainer("actor", config)
    load_whole(second, checkpoint)
    second.update(experience, request)
    messages = []
    for changed in (
        lora_config(folder, layout, optim, replace(lora, rank=lora.rank + 1)),
        lora_config(folder, layout, optim, None),
        lora_config(other, layout, optim, lora),
    ):
        trainer = make_trainer("actor", changed)
        before = complete_state(trainer)
        try:
            load_whole(trainer, checkpoint)
        except CheckpointError as error:
            assert same(before, complete_state(trainer))
            messages.append(str(error))
    return {
        "same state": same(complete_state(first), complete_state(second)),
        "saved": sorted(key for key in stored_tensors(checkpoint) if not key.startswith("optimizer.")),
        "adapters": sorted(name for chunk in first.chunks for _, name in adapter_parameters(chunk)),
        "messages": messages,
    }


def offload_adapters(
    folder: str, layout: ParallelismConfig, optim: OptimConfig, lora: LoraConfig, settings: list[OffloadConfig]
) -> list[dict[str, Any]]:
    """A phase of each kind per setting, with tensors out of memory in between; in 16 bits, with master weights."""
    experience = make_experience()
    ids = experience.sequence_ids.tolist()
    results = []
    for offload in settings:
        config = lora_config(folder, layout, optim, lora)
        config.model.dtype = Dtype.bfloat16
        config.actor.offload = offload
        trainer = make_trainer("actor", config)
        found: list[Any] = []
        for _ in range(2):
            trainer.memory.release()
            out = emptied(trainer)
            fields, _ = trainer.compute_log_probs(rollouts_of(experience), [ids], reference=True)
            found.append(None if fields is None else fields.log_probs.values.tolist())
            trainer.memory.release()
            found.append(values(trainer.update(experience, request_of(experience, [ids], epochs=2))))
            trainer.memory.release(keep_params=True)
            found.append([bucket.tolist() for _, bucket in trainer.export_buckets(1 << 16)])
        results.append({"found": found, "out": out})
    return results
