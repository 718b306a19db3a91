"""Training of a reward model on preference pairs: the task of `megappo rm` behind the supervised loop.

A row of the loop is a pair. Both texts of a pair lie in one micro-batch, since their loss is one number; the loss is
the mean over the pairs of a batch, whatever the layout.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from megappo.balance.layout import RankLayout
from megappo.balance.schedule import build_batch_schedule
from megappo.balance.workload import Workload
from megappo.batch.fields import select
from megappo.batch.refs import Ref
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import PreferenceBatch, TextBatch
from megappo.config.batching import BatchingConfig
from megappo.controller.ports import Plan
from megappo.controller.saving import SavedModel
from megappo.controller.schedules import plan_for_layout
from megappo.controller.sft import Put
from megappo.observability.metrics import Metrics, mean


class RewardModelClient(SavedModel, Protocol):
    """The workers of a reward model in training."""

    @property
    def layout(self) -> RankLayout: ...

    def compute_scores(self, batches: Sequence[Ref[PreferenceBatch]], plan: Plan) -> list[np.ndarray]:
        """Scores [B] of each data rank's texts, in the order of its batch."""
        ...

    def update(self, batches: Sequence[Ref[PreferenceBatch]], requests: Sequence[UpdateRequest]) -> Metrics:
        """Take the optimizer steps of the requests, one batch and request per data rank. Metrics are merged."""
        ...


class PreferenceTask:
    """Port `SupervisedTask`: the Bradley-Terry loss of pairs.

    Args:
        pairs: to train on; the preferred text of pair p is sequence 2 p, the other one 2 p + 1.
        held_out: to judge by; None: there are none.
        workload: what a pair costs, as one text of the tokens of both.
    """

    loss = "reward_model/preference_loss"

    def __init__(
        self,
        pairs: PreferenceBatch,
        held_out: PreferenceBatch | None,
        *,
        model: RewardModelClient,
        put: Put,
        batching: BatchingConfig,
        workload: Workload,
    ) -> None:
        self._pairs = pairs
        self._held_out = held_out
        self._model = model
        self._put = put
        self._batching = batching
        self._workload = workload

    @property
    def models(self) -> Mapping[str, SavedModel]:
        """The one model, by its role."""
        return {"reward_model": self._model}

    def update(self, rows: np.ndarray) -> Metrics:
        """Take one optimizer step on these pairs ([b] int64)."""
        parts, plan = self._deal(self._pairs, rows)
        requests: list[UpdateRequest] = []
        for micro_batches in plan:
            weights = {text: 1.0 / len(rows) for ids in micro_batches for text in ids}
            requests.append(UpdateRequest(mini_batches=[MiniBatch(micro_batches=micro_batches, loss_weights=weights)]))
        return self._model.update([self._put(select(self._pairs, part)) for part in parts], requests)

    def validate(self) -> Metrics:
        """Judge the held-out pairs: `reward_model/val_accuracy`, `reward_model/val_loss` and
        `reward_model/val_difference/mean`, means over pairs."""
        pairs = self._held_out
        if pairs is None:
            return {}
        parts, plan = self._deal(pairs, np.arange(pairs.num_sequences // 2))
        scores = np.concatenate(self._model.compute_scores([self._put(select(pairs, part)) for part in parts], plan))
        margins = pairs.margins[np.concatenate(parts)].astype(np.float64)[::2]
        chosen, rejected = scores.astype(np.float64).reshape(-1, 2).T
        differences = chosen - rejected
        right, count = int((differences > 0).sum()), len(differences)
        return {
            "reward_model/val_accuracy": mean(right, count),
            "reward_model/val_loss": mean(np.logaddexp(0.0, margins - differences).sum(), count),
            "reward_model/val_difference/mean": mean(differences.sum(), count),
        }

    def _deal(self, pairs: PreferenceBatch, rows: np.ndarray) -> tuple[list[np.ndarray], list[list[list[int]]]]:
        """Deal pairs over the data-parallel ranks and their micro-batches.

        Returns:
            [data rank] -> positions of its texts, both of a pair one behind the other; and the micro-batches of text
            ids, [data rank][micro-batch].
        """
        layout = self._model.layout
        lengths = pairs.lengths.reshape(-1, 2).sum(axis=1)
        parts = _balanced(lengths[rows], num_ranks=layout.data, batching=self._batching, workload=self._workload)
        dealt = [rows[np.asarray(part, np.int64)].tolist() for part in parts]
        plan = plan_for_layout(dealt, lengths, layout=layout, batching=self._batching, workload=self._workload)
        texts = [[pairs.sequence_ids[_texts_of(part)].tolist() for part in micro_batches] for micro_batches in plan]
        return [_texts_of(part) for part in dealt], texts


def deal_texts(
    batch: TextBatch, *, layout: RankLayout, batching: BatchingConfig, workload: Workload
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Deal texts to be scored over the data-parallel ranks and their micro-batches.

    Returns:
        [data rank] -> positions of its texts; and the micro-batches of text ids, [data rank][micro-batch].
    """
    lengths = batch.lengths
    parts = _balanced(lengths, num_ranks=layout.data, batching=batching, workload=workload)
    plan = plan_for_layout(parts, lengths, layout=layout, batching=batching, workload=workload)
    ids = [[batch.sequence_ids[np.asarray(part, np.int64)].tolist() for part in row] for row in plan]
    return parts, ids


def _balanced(lengths: np.ndarray, *, num_ranks: int, batching: BatchingConfig, workload: Workload) -> list[list[int]]:
    """Return positions [0, B) dealt over the ranks, of nearly equal cost where `batching.balance` says so."""
    schedule = build_batch_schedule(
        lengths,
        np.arange(len(lengths)),
        num_shards=num_ranks,
        num_mini_batches=1,
        balance=batching.balance,
        keep_groups=False,
        cost=workload,
    )
    return schedule.shards


def _texts_of(pairs: Sequence[int]) -> np.ndarray:
    """Return the positions of both texts of each pair, int64."""
    return (2 * np.asarray(pairs, np.int64)[:, None] + np.arange(2)).ravel()
