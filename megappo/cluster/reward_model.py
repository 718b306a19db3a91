"""A reward model on Megatron workers: the Ray side of scoring, and of `controller.preference.RewardModelClient`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megappo.batch.refs import Ref
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import PreferenceBatch, TextBatch
from megappo.cluster.groups import TrainingGroup
from megappo.cluster.placement import Slot
from megappo.cluster.workers import ModelWorker, TrainingWorker
from megappo.config.run import RunConfig
from megappo.controller.ports import Plan
from megappo.observability.metrics import Metrics, merge

if TYPE_CHECKING:  # torch and megatron wait until the process has its log file and its threads
    from megappo.train.reward_model import RewardModel, RewardModelTrainer


class RewardModelWorker(ModelWorker):
    """One rank of a reward model that only scores."""

    trainer: "RewardModel"

    def setup(self, address: str, port: int) -> None:
        """Join the world, build the model and load its weights."""
        backend = self._connect(address, port, self.config.reward_model.parallelism)
        from megappo.train.reward_model import RewardModel

        self.trainer = RewardModel(self.config, backend=backend)

    def compute_scores(self, batch: TextBatch, micro_batches: list[list[int]]) -> np.ndarray | None:
        """Scores of this rank's texts."""
        return self.trainer.compute_scores(batch, micro_batches)


class RewardModelTrainingWorker(TrainingWorker):
    """One rank of a reward model that is trained."""

    trainer: "RewardModelTrainer"

    def setup(self, address: str, port: int) -> None:
        """Join the world, build the model and load its weights."""
        backend = self._connect(address, port, self.config.reward_model.parallelism)
        from megappo.train.reward_model import RewardModelTrainer

        self.trainer = RewardModelTrainer(self.config, backend=backend)

    def compute_scores(self, batch: TextBatch, micro_batches: list[list[int]]) -> np.ndarray | None:
        """Scores of this rank's texts."""
        return self.trainer.compute_scores(batch, micro_batches)

    def update(self, batch: PreferenceBatch, request: UpdateRequest) -> Metrics:
        """Take the optimizer steps of the request."""
        return self.trainer.update(batch, request)

    def save_scorer(self, folder: str, pad_token_id: int) -> None:
        """Write the weights as a Hugging Face folder (all ranks take part)."""
        self.trainer.save_hf(folder, {"pad_token_id": pad_token_id})


class RewardModelGroup(TrainingGroup):
    """The processes of a reward model that only scores."""

    def __init__(
        self,
        config: RunConfig,
        *,
        slots: Sequence[Slot],
        log_dir: Path,
        worker_class: type[ModelWorker] = RewardModelWorker,
    ) -> None:
        super().__init__(
            worker_class,
            config,
            role="reward_model",
            parallelism=config.reward_model.parallelism,
            slots=slots,
            log_dir=log_dir,
        )

    def compute_scores(self, batches: Sequence[Ref[TextBatch] | Ref[PreferenceBatch]], plan: Plan) -> list[np.ndarray]:
        """Scores of each data rank's texts, in the order of its batch.

        Raises:
            WorkerError: a rank failed, died or did not answer in time.
        """
        return self.run_by_data_rank("compute_scores", batches, plan)


class RewardModelTrainingGroup(RewardModelGroup):
    """The processes of a reward model that is trained (port: RewardModelClient)."""

    def __init__(self, config: RunConfig, *, slots: Sequence[Slot], log_dir: Path) -> None:
        super().__init__(config, slots=slots, log_dir=log_dir, worker_class=RewardModelTrainingWorker)

    def update(self, batches: Sequence[Ref[PreferenceBatch]], requests: Sequence[UpdateRequest]) -> Metrics:
        """Take the optimizer steps of the requests; metrics of all output ranks merged."""
        self.num_updates += 1
        return merge(self.run_by_data_rank("update", batches, requests))

    def save_scorer(self, folder: str, *, pad_token_id: int) -> None:
        """Write the model as a Hugging Face folder of a sequence-classification model that says which token is padding:
        transformers' models look for the last token that is none."""
        self.run("save_scorer", folder, pad_token_id)
