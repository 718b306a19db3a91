"""Micro-batches follow from the layout, the same way for every pass."""

import numpy as np
import pytest

from megappo.balance.layout import RankLayout
from megappo.config.batching import BatchingConfig
from megappo.controller.schedules import plan_for_layout

PLAIN = RankLayout(data=2)
PIPELINE = RankLayout(data=2, pipeline=3)
INTERLEAVED = RankLayout(data=2, pipeline=3, virtual_pipeline=2)


@pytest.mark.parametrize(
    ("layout", "fewest", "count"),
    [
        (PLAIN, None, 1),
        (PLAIN, 4, 4),
        (PIPELINE, None, 6),
        (PIPELINE, 4, 4),
        (INTERLEAVED, None, 6),
        (INTERLEAVED, 4, 6),
    ],
)
def test_a_pipeline_gets_two_micro_batches_per_stage_and_an_interleaved_one_whole_rounds(layout, fewest, count):
    batching = BatchingConfig(micro_batch_tokens=100, min_micro_batches=fewest)
    plan = plan_for_layout([[0, 1, 2, 3], [4]], np.array([5, 6, 7, 8, 9]), layout=layout, batching=batching)
    assert [len(rank) for rank in plan] == [count, count]
    assert [sorted(position for chosen in rank for position in chosen) for rank in plan] == [[0, 1, 2, 3], [4]]
