"""Micro-batches follow from the layout, the same way for every pass."""

import numpy as np
import pytest

from megappo.balance.layout import RankLayout
from megappo.balance.schedule import BatchSchedule
from megappo.balance.workload import TOKENS
from megappo.config.algorithm import Aggregation
from megappo.config.batching import BatchingConfig
from megappo.controller.schedules import StepSchedule, plan_for_layout

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


@pytest.mark.parametrize(("loss_tokens", "trained"), [([3, 0, 1, 2], 2), ([3, 1, 0, 0], 1), ([0, 0, 0, 0], 0)])
def test_a_mini_batch_without_loss_tokens_makes_no_step_on_any_rank(loss_tokens: list[int], trained: int) -> None:
    schedule = StepSchedule(
        batch=BatchSchedule(shards=[[0, 2], [1, 3]], mini_batches=[[[0], [1]], [[2], [3]]]),
        sequence_ids=np.arange(10, 14),
        group_ids=np.arange(4),
        lengths=np.full(4, 5),
        batching=BatchingConfig(prompts_per_step=4, mini_batch_prompts=2, micro_batch_tokens=100),
        workload=TOKENS,
    )
    counts = np.array(loss_tokens)
    requests = schedule.update_requests(
        PLAIN, loss_tokens=counts, aggregation=Aggregation.token_mean, constant_length=None, whitening=None
    )
    assert [len(request.mini_batches) for request in requests] == [trained, trained]
    assert schedule.count_without_tokens(counts) == 2 - trained
    weights = [
        weight for request in requests for batch in request.mini_batches for weight in batch.loss_weights.items()
    ]
    tokens = dict(zip(range(10, 14), loss_tokens))
    assert sum(tokens[sequence_id] * weight for sequence_id, weight in weights) == pytest.approx(trained)


def test_every_layout_gets_its_own_plan_whatever_was_planned_before() -> None:
    def schedule() -> StepSchedule:
        return StepSchedule(
            batch=BatchSchedule(shards=[[0, 2], [1, 3]], mini_batches=[[[0], [1]], [[2], [3]]]),
            sequence_ids=np.arange(10, 14),
            group_ids=np.arange(4),
            lengths=np.array([6, 5, 4, 3]),
            batching=BatchingConfig(prompts_per_step=4, mini_batch_prompts=2, micro_batch_tokens=7),
            workload=TOKENS,
        )

    counts = np.ones(4, int)

    def micro_batches(planned: StepSchedule, layout: RankLayout) -> list[list[list[list[int]]]]:
        requests = planned.update_requests(
            layout,
            loss_tokens=counts,
            aggregation=Aggregation.token_mean,
            constant_length=None,
            whitening=None,
        )
        return [[part.micro_batches for part in request.mini_batches] for request in requests]

    whole, used = RankLayout(data=1), schedule()
    for layout in (PLAIN, whole, PLAIN):
        assert used.plan_pass(layout) == schedule().plan_pass(layout)
        assert micro_batches(used, layout) == micro_batches(schedule(), layout)
    assert used.plan_pass(PLAIN) == [[[10], [12]], [[11], [13]]]
    assert used.plan_pass(whole) == [[[10], [11], [12, 13]]]
    assert micro_batches(used, PLAIN) == [[[[10]], [[12]]], [[[11]], [[13]]]]
    assert micro_batches(used, whole) == [[[[10], [11]], [[12, 13]]]]
