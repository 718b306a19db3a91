"""Jobs of the distributed trainer tests; each runs on every rank."""

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core import parallel_state

from megappo.batch.fields import select
from megappo.batch.stages import TokenField
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.models.export import export_hf_state
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.trainer import ModelTrainer
from tests.train import plain
from tests.train.batches import MicroBatches, make_experience, request_of, rollouts_of


@dataclass
class RankResult:
    """What one rank gave back."""

    data_rank: int
    numbers: TokenField | None
    """Log-probs or values of its sequences (output ranks)."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> (total, count)."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of this stage after clipping, under Hugging Face names."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of this stage after the step, under Hugging Face names."""


def run_config(folder: str, parallelism: ParallelismConfig, optim: OptimConfig) -> RunConfig:
    """The configuration that `tests.train.plain` computes by hand."""
    config = RunConfig()
    config.model.path = folder
    config.actor.parallelism = config.critic.parallelism = parallelism
    config.actor.optim = config.critic.optim = optim
    config.rollout.sampling.temperature = plain.TEMPERATURE
    config.algorithm.policy_loss.clip.low = plain.CLIP_LOW
    config.algorithm.policy_loss.clip.high = plain.CLIP_HIGH
    config.algorithm.entropy.coef = plain.ENTROPY_COEF
    config.algorithm.kl.in_loss.coef = plain.KL_COEF
    config.algorithm.value_loss.clip = plain.VALUE_CLIP
    return config


def train_once(
    role: str, folder: str, layout: ParallelismConfig, optim: OptimConfig, deal: list[MicroBatches]
) -> RankResult:
    """A forward pass over this data rank's sequences and one optimizer step on them.

    Args:
        deal: micro-batches of each data rank.
    """
    config = run_config(folder, layout, optim)
    data_rank = parallel_state.get_data_parallel_rank()
    micro_batches = deal[data_rank]
    experience = make_experience()
    mine = [index for index, sequence in enumerate(experience.sequence_ids) if sequence in sum(micro_batches, [])]
    experience = select(experience, mine)
    trainer: ModelTrainer
    if role == "actor":
        trainer = ActorTrainer(config, backend=CPU)
        numbers, metrics = trainer.compute_log_probs(rollouts_of(experience), micro_batches)
    else:
        trainer = CriticTrainer(config, backend=CPU)
        numbers, metrics = trainer.compute_values(rollouts_of(experience), micro_batches)
    metrics = {f"forward {name}": stat for name, stat in metrics.items()}
    metrics |= trainer.update(experience, request_of(make_experience(), micro_batches))
    return RankResult(
        data_rank=data_rank,
        numbers=numbers,
        metrics={name: (stat.total, stat.count) for name, stat in metrics.items()},
        weights=weights_now(trainer),
        gradients={} if optim.distributed else gradients_now(trainer),
    )


def weights_now(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    """A copy of this stage's weights under Hugging Face names."""
    return {name: tensor.clone() for name, tensor in export_hf_state(trainer.chunks).items()}


def gradients_now(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    """This stage's gradients under Hugging Face names; the weights are lost."""
    with torch.no_grad():
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return weights_now(trainer)


def scattered(results: list[RankResult], sequence_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Numbers of all data ranks in the order of the whole batch, [N]; NaN where no rank gave any."""
    numbers = np.full(offsets[-1], np.nan, np.float32)
    for result in results:
        if result.numbers is None:
            continue
        for index, sequence in enumerate(result.numbers.sequence_ids.tolist()):
            place = sequence_ids.tolist().index(sequence)
            start, stop = result.numbers.offsets[index : index + 2]
            numbers[offsets[place] : offsets[place + 1]] = result.numbers.values[start:stop]
    return numbers
