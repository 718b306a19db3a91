"""The critic: values of the states before sampled tokens, and its update.

Shapes: N packed tokens, T input tokens of a micro-batch, of which each of R context-parallel ranks holds T / R, n
tokens that it predicts. The value of the state before token t is the critic's output at input position t - 1, the same
position whose logits predict token t in the actor.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megappo.algo.losses import ValueLossBatch, compute_value_loss
from megappo.batch.fields import BatchError
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.run import RunConfig
from megappo.device.backend import Backend
from megappo.models.build import Head
from megappo.observability.metrics import Metrics
from megappo.observability.phases import in_phase
from megappo.train.context import gather_tokens
from megappo.train.packing import PackedMicroBatch
from megappo.train.trainer import LossFunction, ModelTrainer, token_weights


class CriticTrainer(ModelTrainer):
    """The value model on this rank. Values are not scaled by the sampling temperature."""

    def __init__(self, config: RunConfig, *, backend: Backend) -> None:
        """Build the critic from `critic.path`, or from `model.path` with a value head of zeros."""
        super().__init__(
            role="critic",
            path=config.critic.path or config.model.path,
            model=config.model,
            training=config.critic,
            head=Head.value_function,
            backend=backend,
            seed=config.seed,
        )
        self.algorithm = config.algorithm

    @in_phase("values")
    def compute_values(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[TokenField | None, Metrics]:
        """Value of the state before each response token of all sequences of the batch, in its order.

        Args:
            micro_batches: sequence ids; together each sequence of the batch once.

        Returns:
            The values (None on all but the output rank) and no metrics: the update reports the values it starts from.
        """

        def read(values: torch.Tensor, micro_batch: PackedMicroBatch) -> list[torch.Tensor]:
            return [at_predicted(values, micro_batch)]

        fields = self._compute_token_fields(batch, micro_batches, read, predict=batch.response_mask)
        return (None if fields is None else fields[0]), {}

    @in_phase("update")
    def update(self, experience: Experience, request: UpdateRequest) -> Metrics:
        """Run the update phase: one optimizer step per mini-batch, `epochs` times over.

        Returns:
            `critic/...` of the value loss (`megappo.algo.losses.value`) and of the optimizer steps
            (`ModelTrainer._step_metrics`); nothing on all but the output rank.

        Raises:
            BatchError: the experience has no values or returns, or its ids and the request do not match.
            NonFiniteError: too many steps in a row had a gradient that is not finite.
        """
        steps = [self._value_step(experience, mini_batch) for mini_batch in request.mini_batches]
        return self._optimize(steps, epochs=request.epochs)

    def _value_step(self, experience: Experience, mini_batch: MiniBatch) -> tuple[list[PackedMicroBatch], LossFunction]:
        if experience.values is None or experience.returns is None:
            raise BatchError("the critic's update needs Experience.values and Experience.returns")
        packed = self._pack(experience, mini_batch.micro_batches, experience.loss_mask)
        inputs = [
            ValueLossBatch(
                old_values=self._tensor(experience.values[micro_batch.token_index]),
                returns=self._tensor(experience.returns[micro_batch.token_index]),
                loss_mask=self._tensor(np.ones(len(micro_batch.token_index), bool)),
                loss_weights=self._tensor(token_weights(experience, mini_batch, micro_batch)),
            )
            for micro_batch in packed
        ]

        def loss(values: torch.Tensor, index: int) -> tuple[torch.Tensor, Metrics]:
            chosen = at_predicted(values, packed[index])
            output = compute_value_loss(chosen, inputs[index], self.algorithm)
            return output.loss, output.metrics

        return packed, loss


def at_predicted(values: torch.Tensor, micro_batch: PackedMicroBatch) -> torch.Tensor:
    """Values [T / R] of this rank's tokens -> values [n] of the states before the predicted tokens."""
    chosen = values.index_select(0, micro_batch.rows)
    return chosen if micro_batch.split is None else gather_tokens(chosen, micro_batch.split)
