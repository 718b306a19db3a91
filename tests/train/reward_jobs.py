"""Pairs of texts, and jobs that score them or train on them."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from megappo.batch.fields import BatchError, offsets_of, select
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import PreferenceBatch
from megappo.config.lora import LoraConfig
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.errors import CheckpointError
from megappo.train.reward_model import RewardModel, RewardModelTrainer
from tests.train.jobs import gradients_now

LENGTHS = [5, 9, 3, 4, 12, 7, 1, 6]
"""Tokens of the texts of four pairs."""
MARGINS = [0.0, 0.5, 0.0, 1.5]


def make_pairs(vocab: int = 64) -> PreferenceBatch:
    """Four pairs; the preferred text comes first in some."""
    generator = np.random.default_rng(7)
    texts = [generator.integers(3, vocab, size=length) for length in LENGTHS]
    return PreferenceBatch(
        offsets=offsets_of([length + 1 for length in LENGTHS]),
        tokens=np.concatenate([np.append(text, 0) for text in texts]).astype(np.int32),
        sequence_ids=np.arange(10, 18, dtype=np.int64),
        pair_ids=np.array([4, 4, 2, 2, 9, 9, 7, 7]),
        is_chosen=np.array([True, False, False, True, True, False, False, True]),
        margins=np.repeat(np.array(MARGINS, np.float32), 2),
    )


@dataclass
class Found:
    """What one rank gave back."""

    sequence_ids: list[int]
    scores: np.ndarray | None
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> (total, count)."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen_scores: np.ndarray | None = None
    """Of the model that only scores."""


def score_and_step(folder: str, layout: ParallelismConfig, deal: list[list[list[int]]]) -> Found:
    """Score this data rank's texts with both classes and take one optimizer step; `deal` holds the micro-batches of
    each data rank."""
    config = RunConfig()
    config.reward_model.path = folder
    config.reward_model.parallelism = layout
    config.rm.optim = OptimConfig(clip_grad=0.0)
    micro_batches = deal[parallel_state.get_data_parallel_rank()]
    pairs = make_pairs()
    mine = [text for ids in micro_batches for text in ids]
    batch = select(pairs, np.flatnonzero(np.isin(pairs.sequence_ids, mine)))
    frozen = RewardModel(config, backend=CPU).compute_scores(batch, micro_batches)
    trainer = RewardModelTrainer(config, backend=CPU)
    scores = trainer.compute_scores(batch, micro_batches)
    weights = dict.fromkeys(mine, 1 / 4)
    request = UpdateRequest(mini_batches=[MiniBatch(micro_batches=micro_batches, loss_weights=weights)])
    metrics = trainer.update(batch, request)
    return Found(
        sequence_ids=batch.sequence_ids.tolist(),
        scores=scores,
        metrics={name: (stat.total, stat.count) for name, stat in metrics.items()},
        gradients=gradients_now(trainer),
        frozen_scores=frozen,
    )


def scores_of(folder: str, layout: ParallelismConfig) -> np.ndarray | None:
    """Scores of the eight texts, in three micro-batches."""
    config = RunConfig()
    config.reward_model.path = folder
    config.reward_model.parallelism = layout
    ids = make_pairs().sequence_ids.tolist()
    config.reward_model.offload.params = True
    model = RewardModel(config, backend=CPU)
    model.memory.release()
    assert not any(parameter.untyped_storage().nbytes() for parameter in model.chunks[0].parameters())
    return model.compute_scores(make_pairs(), [ids[3:], ids[:2], [ids[2]]])


def train_and_save(
    folder: str, layout: ParallelismConfig, output: str, lora: LoraConfig | None = None
) -> np.ndarray | None:
    """Take three steps from a language model, write the result, and return its scores."""
    config = RunConfig()
    config.model.path = folder
    config.reward_model.parallelism = layout
    config.rm.optim = OptimConfig(lr=1e-2)
    config.rm.lora = lora
    config.reward_model.offload.params = True
    trainer = RewardModelTrainer(config, backend=CPU)
    pairs = make_pairs()
    ids = pairs.sequence_ids.tolist()
    step = MiniBatch(micro_batches=[ids], loss_weights=dict.fromkeys(ids, 0.25))
    trainer.update(pairs, UpdateRequest(mini_batches=[step] * 3))
    trainer.memory.release()
    trainer.save_hf(Path(output), {"pad_token_id": 0})
    return trainer.compute_scores(pairs, [ids])


def refusals(policy: str, folder: str) -> list[str]:
    """Messages: a model without a score head is to score; a pair is cut by micro-batches."""
    config = RunConfig()
    messages = []
    config.reward_model.path = policy
    try:
        RewardModel(config, backend=CPU)
    except CheckpointError as error:
        messages.append(str(error))
    config.reward_model.path = folder
    ids = make_pairs().sequence_ids.tolist()
    step = MiniBatch(micro_batches=[ids[:3], ids[3:]], loss_weights=dict.fromkeys(ids, 0.25))
    try:
        RewardModelTrainer(config, backend=CPU).update(make_pairs(), UpdateRequest(mini_batches=[step]))
    except BatchError as error:
        messages.append(str(error))
    return messages
