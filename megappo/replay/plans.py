"""Recorded work, cut for another layout. On the layout of the record it is cut as it was.

Positions index the sequences of the record, B of them.
"""

from collections.abc import Sequence

import numpy as np

from megappo.balance.layout import RankLayout
from megappo.balance.partition import partition
from megappo.balance.schedule import rank_parts
from megappo.balance.workload import Workload
from megappo.batch.requests import MiniBatch, UpdateRequest
from megappo.config.batching import BatchingConfig
from megappo.controller.record_folder import StepRecord
from megappo.controller.schedules import plan_for_layout


class RecordedWork:
    """The sequences of a record, dealt to the data-parallel ranks of a layout."""

    def __init__(self, record: StepRecord, layout: RankLayout, *, batching: BatchingConfig, workload: Workload) -> None:
        self._record = record
        self._layout = layout
        self._batching = batching
        self._workload = workload
        self._ids = record.experience.sequence_ids.tolist()
        self.parts = self._deal()
        """[data rank] -> positions."""

    def _deal(self) -> list[list[int]]:
        """Keep shards whole where there are enough of them; else deal the sequences anew."""
        data, position = self._layout.data, {key: index for index, key in enumerate(self._ids)}
        if len(self._record.shards) % data == 0:
            return rank_parts([[position[key] for key in shard] for shard in self._record.shards], data)
        return partition(self._workload.costs(self._record.experience.lengths), data, equal_counts=False)

    def pass_plan(self) -> list[list[list[int]]]:
        """Return the micro-batches of a forward pass: [data rank][micro-batch] -> sequence ids."""
        return self._micro_batches(self.parts)

    def requests(self, role: str) -> list[UpdateRequest]:
        """Return what a role was told to do in the update, one request per data rank; loss weights, whitening and
        selected tokens are the recorded ones."""
        recorded = self._record.requests[role]
        mini_batches: list[list[MiniBatch]] = [[] for _ in range(self._layout.data)]
        for parts in zip(*(request.mini_batches for request in recorded), strict=True):
            weights = {key: weight for part in parts for key, weight in part.loss_weights.items()}
            chosen = [[index for index in part if self._ids[index] in weights] for part in self.parts]
            for rank, micro_batches in enumerate(self._micro_batches(chosen)):
                mine = {key: weights[key] for ids in micro_batches for key in ids}
                mini_batches[rank].append(MiniBatch(micro_batches=micro_batches, loss_weights=mine))
        first = recorded[0]
        return [
            UpdateRequest(mini_batches=found, epochs=first.epochs, whitening=first.whitening, selection=first.selection)
            for found in mini_batches
        ]

    def _micro_batches(self, parts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        plan = plan_for_layout(
            parts,
            np.asarray(self._record.experience.lengths),
            layout=self._layout,
            batching=self._batching,
            workload=self._workload,
        )
        return [[[self._ids[index] for index in positions] for positions in rank] for rank in plan]
