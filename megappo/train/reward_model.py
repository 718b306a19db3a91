"""A reward model: scores of whole texts, and its training on preference pairs.

Shapes: B texts of a batch, T input tokens of a micro-batch, b texts and P pairs of a micro-batch.

The model is a critic's: one value per token. The score of a text is the value at its last token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megappo.algo.losses.preference import compute_preference_loss
from megappo.batch.fields import BatchError
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import PreferenceBatch, TextBatch
from megappo.config.run import CriticConfig, RunConfig
from megappo.device.backend import Backend
from megappo.models.build import Head
from megappo.observability.metrics import Metrics
from megappo.observability.phases import in_phase
from megappo.train.critic import at_predicted
from megappo.train.offload import TrainerMemory
from megappo.train.packed_model import PackedModel
from megappo.train.packing import PackedMicroBatch
from megappo.train.trainer import LossFunction, ModelTrainer
from megappo.weights.score_head import check_score_head

ROLE = "reward_model"


class _ScoringModel(PackedModel):
    """What scores texts."""

    @in_phase("scores")
    def compute_scores(self, batch: TextBatch, micro_batches: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Return the score of each text, [B] float32 in the order of the batch; None on all but the output rank.

        Args:
            micro_batches: text ids; together each text of the batch once.
        """

        def read(values: torch.Tensor, micro_batch: PackedMicroBatch) -> list[torch.Tensor]:
            return [at_predicted(values, micro_batch)]

        fields = self._compute_token_fields(batch, micro_batches, read, predict=batch.ends)
        return None if fields is None else fields[0].values[batch.ends]


class RewardModel(_ScoringModel):
    """A reward model on this rank that only scores: no gradients, no optimizer."""

    def __init__(self, config: RunConfig, *, backend: Backend) -> None:
        """Build the model in `reward_model.path`.

        Raises:
            CheckpointError: it has no score head, or one of several labels.
        """
        section = config.reward_model
        assert section.path is not None, "a rule asks for reward_model.path"
        super().__init__(path=section.path, model=config.model, parallelism=section.parallelism)
        check_score_head(section.path, needed=True)
        self.chunks = self._build(Head.value_function, backend, seed=config.seed)
        self.memory = TrainerMemory(section.offload, self.chunks, None, backend=backend)


class RewardModelTrainer(_ScoringModel, ModelTrainer):
    """A reward model on this rank that is trained on preference pairs."""

    def __init__(self, config: RunConfig, *, backend: Backend) -> None:
        """Build the model from `reward_model.path`, or from `model.path` with a score head of zeros."""
        section, settings = config.reward_model, config.rm
        training = CriticConfig(
            parallelism=section.parallelism, optim=settings.optim, offload=section.offload, lora=settings.lora
        )
        super().__init__(
            role=ROLE,
            path=section.path or config.model.path,
            model=config.model,
            training=training,
            head=Head.value_function,
            backend=backend,
            seed=config.seed,
        )

    @in_phase("update")
    def update(self, batch: PreferenceBatch, request: UpdateRequest) -> Metrics:
        """Run the update phase: one optimizer step per mini-batch. Each pair lies in one micro-batch, and the weight of
        its loss is that of its preferred text.

        Returns:
            `reward_model/...` of the preference loss (`megappo.algo.losses.preference`) and of the optimizer steps
            (`ModelTrainer._step_metrics`); nothing on all but the output rank.

        Raises:
            BatchError: a pair is not whole in its micro-batch.
            NonFiniteError: too many steps in a row had a gradient that is not finite.
        """
        steps = [self._preference_step(batch, mini_batch) for mini_batch in request.mini_batches]
        return self._optimize(steps, epochs=request.epochs)

    def _preference_step(
        self, batch: PreferenceBatch, mini_batch: MiniBatch
    ) -> tuple[list[PackedMicroBatch], LossFunction]:
        packed = self._pack(batch, mini_batch.micro_batches, batch.ends)
        pairs = [_pairs_of(batch, micro_batch.sequence_index) for micro_batch in packed]
        texts = [batch.sequence_ids[m.sequence_index[chosen]].tolist() for m, (chosen, _) in zip(packed, pairs)]
        weights = [np.array([mini_batch.loss_weights[text] for text in ids], np.float32) for ids in texts]
        margins = [batch.margins[m.sequence_index[chosen]] for m, (chosen, _) in zip(packed, pairs)]

        def loss(values: torch.Tensor, index: int) -> tuple[torch.Tensor, Metrics]:
            scores = at_predicted(values, packed[index])
            chosen, rejected = (scores[self._tensor(places)] for places in pairs[index])
            output = compute_preference_loss(
                chosen, rejected, margins=self._tensor(margins[index]), weights=self._tensor(weights[index])
            )
            return output.loss, output.metrics

        return packed, loss


def _pairs_of(batch: PreferenceBatch, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the preferred texts of a micro-batch are among its texts, [P] int64, and the other text of each.

    Args:
        sequences: [b] positions in the batch of the texts of the micro-batch.
    """
    pair, preferred = batch.pair_ids[sequences], batch.is_chosen[sequences]
    chosen, rejected = (
        side[np.argsort(pair[side])] for side in (np.flatnonzero(preferred), np.flatnonzero(~preferred))
    )
    if not np.array_equal(pair[chosen], pair[rejected]):
        raise BatchError(
            f"a micro-batch has the preferred texts of pairs {pair[chosen].tolist()} and the others of "
            f"{pair[rejected].tolist()}: both texts of a pair are needed in one"
        )
    return chosen, rejected
