"""Hop 3 of a step: who computes what, in which micro-batch. Joins `megappo.balance` with sequence ids.

Positions index the step's sequences (order of sequence ids); plans and requests carry sequence ids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from megappo.algo.aggregation import compute_loss_weights
from megappo.balance.layout import RankLayout
from megappo.balance.micro_batches import plan_micro_batches
from megappo.balance.partition import imbalance
from megappo.balance.schedule import BatchSchedule, build_batch_schedule, rank_parts
from megappo.balance.workload import TOKENS, Workload
from megappo.batch.requests import MiniBatch, TokenSelection, UpdateRequest, Whitening
from megappo.config.algorithm import Aggregation
from megappo.config.batching import BatchingConfig
from megappo.controller.rollouts import ScoredRollouts

_Plans = dict[tuple[int | None, RankLayout], list[list[list[int]]]]
"""Index of the mini-batch (None: the whole step) and layout -> [data rank][micro-batch] -> sequence ids."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepSchedule:
    """The schedule of one step over its sequences."""

    batch: BatchSchedule
    sequence_ids: np.ndarray
    """[B] int64."""
    group_ids: np.ndarray
    """[B] int64."""
    lengths: np.ndarray
    """[B] int64, prompt included."""
    batching: BatchingConfig
    workload: Workload
    _plans: _Plans = field(default_factory=dict, init=False, compare=False, repr=False)

    def shard_ids(self) -> list[list[int]]:
        """Return the sequence ids of every shard."""
        ids = self.sequence_ids.tolist()
        return [[ids[position] for position in positions] for positions in self.batch.shards]

    def per_shard(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut a per-sequence array [B] into shard order."""
        return [values[np.asarray(positions, dtype=np.int64)] for positions in self.batch.shards]

    def gather(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Put per-shard arrays back into the order of the step's sequences, [B]."""
        joined = np.concatenate(parts)
        whole = np.empty_like(joined)
        whole[np.concatenate([np.asarray(positions, dtype=np.int64) for positions in self.batch.shards])] = joined
        return whole

    def plan_pass(self, layout: RankLayout) -> list[list[list[int]]]:
        """Return the micro-batches of a forward pass: [data rank][micro-batch] -> sequence ids."""
        return self._micro_batches(None, layout)

    def update_requests(
        self,
        layout: RankLayout,
        *,
        loss_tokens: np.ndarray,
        aggregation: Aggregation,
        constant_length: float | None,
        whitening: Whitening | None,
        selection: TokenSelection | None = None,
    ) -> list[UpdateRequest]:
        """Return one request per data rank. Loss weights come from the counts of the whole mini-batch.

        A mini-batch without loss tokens makes no step: its gradient is 0, from which an optimizer with momentum or
        weight decay would move the weights all the same.

        Args:
            loss_tokens: [B] int64, tokens of each sequence on the loss mask.
        """
        per_rank: list[list[MiniBatch]] = [[] for _ in range(layout.data)]
        for index, shards in enumerate(self.batch.mini_batches):
            positions = _positions_of(shards)
            if not loss_tokens[positions].any():
                continue
            weights = compute_loss_weights(
                loss_tokens[positions], self.group_ids[positions], mode=aggregation, constant_length=constant_length
            )
            weight_of = dict(zip(self.sequence_ids[positions].tolist(), weights.tolist()))
            for rank, micro_batches in enumerate(self._micro_batches(index, layout)):
                mine = {sequence_id: weight_of[sequence_id] for ids in micro_batches for sequence_id in ids}
                per_rank[rank].append(MiniBatch(micro_batches=micro_batches, loss_weights=mine))
        return [
            UpdateRequest(
                mini_batches=mini_batches,
                epochs=self.batching.ppo_epochs,
                whitening=whitening,
                selection=selection,
            )
            for mini_batches in per_rank
        ]

    def count_without_tokens(self, loss_tokens: np.ndarray) -> int:
        """Return how many mini-batches `update_requests` leaves out: none of their tokens is on the loss mask."""
        return sum(not loss_tokens[_positions_of(shards)].any() for shards in self.batch.mini_batches)

    def imbalance(self) -> float:
        """Return max / mean - 1 of the shards' costs."""
        costs = self.workload.costs(self.lengths)
        return imbalance([costs[np.asarray(shard, dtype=np.int64)].sum() for shard in self.batch.shards])

    def _micro_batches(self, mini_batch: int | None, layout: RankLayout) -> list[list[list[int]]]:
        """Return the plan of a mini-batch by its index, or of the whole step (None): [data rank][micro-batch] ->
        sequence ids. Each is made once, for actor and critic of one layout alike."""
        key = (mini_batch, layout)
        if key not in self._plans:
            shards = self.batch.shards if mini_batch is None else self.batch.mini_batches[mini_batch]
            parts, ids = rank_parts(shards, layout.data), self.sequence_ids.tolist()
            plan = plan_for_layout(parts, self.lengths, layout=layout, batching=self.batching, workload=self.workload)
            self._plans[key] = [[[ids[at] for at in positions] for positions in rank] for rank in plan]
        return self._plans[key]


def _positions_of(shards: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the positions of a mini-batch, ascending."""
    return np.sort(np.fromiter(chain.from_iterable(shards), dtype=np.int64))


def plan_for_layout(
    parts: Sequence[Sequence[int]],
    lengths: np.ndarray,
    *,
    layout: RankLayout,
    batching: BatchingConfig,
    workload: Workload = TOKENS,
) -> list[list[list[int]]]:
    """Return the micro-batches of a pass on this layout: [data rank][micro-batch] -> positions.

    A pipeline gets at least 2 per stage unless the configuration says otherwise (fewer leave most stages idle), an
    interleaved one a multiple of its stages (Megatron-Core's interleaved schedule asks for it).

    Args:
        parts: positions of each data rank.
        lengths: [B] int64.
    """
    return plan_micro_batches(
        parts,
        lengths,
        max_tokens=batching.micro_batch_tokens,
        min_micro_batches=batching.min_micro_batches or (2 * layout.pipeline if layout.pipeline > 1 else 1),
        multiple_of=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        cost=workload,
    )


def schedule_step(
    rollouts: ScoredRollouts,
    batching: BatchingConfig,
    *,
    data_sizes: Sequence[int],
    keep_groups: bool,
    workload: Workload,
) -> StepSchedule:
    """Spread a step's sequences over shards and mini-batches.

    Args:
        data_sizes: data-parallel sizes of the worker groups; there are as many shards as their least common multiple.
        keep_groups: keep all samples of a prompt in one shard (estimators of scope `group_token`).
        workload: what a sequence costs.
    """
    schedule = build_batch_schedule(
        rollouts.lengths,
        rollouts.group_ids,
        num_shards=math.lcm(*data_sizes),
        num_mini_batches=batching.num_mini_batches,
        balance=batching.balance,
        keep_groups=keep_groups,
        cost=workload,
    )
    return StepSchedule(
        batch=schedule,
        sequence_ids=np.array([info.sequence_id for info in rollouts.sequences], dtype=np.int64),
        group_ids=rollouts.group_ids,
        lengths=rollouts.lengths,
        batching=batching,
        workload=workload,
    )
