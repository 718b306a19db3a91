"""Supervised fine-tuning through the actor's own update: cross-entropy is the policy-gradient loss with advantage 1.

Shapes: N packed tokens, B sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megappo.balance.schedule import build_batch_schedule
from megappo.balance.workload import Workload
from megappo.batch.fields import Packed, select
from megappo.batch.refs import Ref
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch
from megappo.config.batching import BatchingConfig
from megappo.controller.ports import ActorClient, Plan, Shard
from megappo.controller.saving import SavedModel
from megappo.controller.schedules import plan_for_layout
from megappo.observability.metrics import Metrics, mean, total


class Put(Protocol):
    """Makes a handle of a batch that the driver made, for the ranks to fetch."""

    def __call__(self, batch: Packed, /) -> Ref[Packed]: ...


_POLICY_LOSS = "actor/policy_loss"
_UNUSED = (_POLICY_LOSS, "actor/loss/", "actor/first_step/", "actor/approx_kl")
"""How metrics of the update begin that say the same as others here, or nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Spread:
    """Who computes which sequences of a batch, and when."""

    parts: list[list[int]]
    """[data rank] -> positions."""
    plan: list[list[list[int]]]
    """[data rank][micro-batch] -> positions."""


class SftTask:
    """Port `SupervisedTask`: cross-entropy of the tokens on the response mask.

    The loss of a step is the mean over the trained tokens of all its rows, so neither data parallelism nor the cut into
    micro-batches changes it.

    Args:
        rows: the training rows; sequence ids are positions.
        held_out: rows to measure only; None: there are none.
        workload: what a sequence costs.
    """

    loss = "sft/loss"

    def __init__(
        self,
        rows: RolloutBatch,
        held_out: RolloutBatch | None,
        *,
        actor: ActorClient,
        put: Put,
        batching: BatchingConfig,
        workload: Workload,
    ) -> None:
        self._rows = rows
        self._held_out = held_out
        self._actor = actor
        self._put = put
        self._batching = batching
        self._workload = workload
        self._measuring: tuple[list[Shard], Plan] | None = None
        """The held-out rows, sent once."""

    @property
    def models(self) -> Mapping[str, SavedModel]:
        """The actor."""
        return {"actor": self._actor}

    def update(self, rows: np.ndarray) -> Metrics:
        """Take one optimizer step on these rows."""
        experience = _supervised(select(self._rows, rows))
        spread = self._spread(experience.lengths, experience.sequence_ids)
        tokens = int(experience.loss_mask.sum())
        ids = experience.sequence_ids
        requests: list[UpdateRequest] = []
        for micro_batches in spread.plan:
            named = _named(micro_batches, ids)
            weights = {sequence_id: 1.0 / tokens for chosen in named for sequence_id in chosen}
            requests.append(UpdateRequest(mini_batches=[MiniBatch(micro_batches=named, loss_weights=weights)]))
        measured = self._actor.update([self._put(select(experience, part)) for part in spread.parts], requests)
        kept = {name: stat for name, stat in measured.items() if not name.startswith(_UNUSED)}
        return kept | {self.loss: measured[_POLICY_LOSS], "sft/loss_tokens": total(tokens)}

    def validate(self) -> Metrics:
        """Measure the cross-entropy of the held-out rows."""
        if self._held_out is None:
            return {}
        if self._measuring is None:
            self._measuring = self._send(self._held_out)
        fields, _ = self._actor.compute_log_probs(*self._measuring)
        found = self._actor.read_sequences(fields, self._held_out.sequence_ids.tolist())
        return {
            "sft/val_loss": mean(-float(found.values.sum(dtype=np.float64)), int(self._held_out.response_mask.sum()))
        }

    def _send(self, rows: RolloutBatch) -> tuple[list[Shard], Plan]:
        spread = self._spread(rows.lengths, rows.sequence_ids)
        shards = [
            Shard(sequence_ids=rows.sequence_ids[part].tolist(), pieces=[self._put(select(rows, part))])
            for part in spread.parts
        ]
        return shards, [_named(micro_batches, rows.sequence_ids) for micro_batches in spread.plan]

    def _spread(self, lengths: np.ndarray, ids: np.ndarray) -> _Spread:
        """Deal sequences to the data-parallel ranks, and cut each rank's into micro-batches."""
        layout, batching = self._actor.layout, self._batching
        schedule = build_batch_schedule(
            lengths,
            ids,
            num_shards=layout.data,
            num_mini_batches=1,
            balance=batching.balance,
            keep_groups=False,
            cost=self._workload,
        )
        parts = schedule.shards
        plan = plan_for_layout(parts, lengths, layout=layout, batching=batching, workload=self._workload)
        return _Spread(parts=parts, plan=plan)


def _named(micro_batches: Sequence[Sequence[int]], ids: np.ndarray) -> list[list[int]]:
    """Return sequence ids for positions."""
    return [ids[np.asarray(positions, np.int64)].tolist() for positions in micro_batches]


def _supervised(batch: RolloutBatch) -> Experience:
    """Return rows as experience with advantage 1 on the tokens to train on."""
    return Experience(
        offsets=batch.offsets,
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        rollout_log_probs=batch.rollout_log_probs,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        loss_mask=batch.response_mask,
        advantages=batch.response_mask.astype(np.float32),
    )
