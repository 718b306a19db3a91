"""The task of `megappo rm`: how pairs are dealt, and the numbers of a validation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from megappo.balance.layout import RankLayout
from megappo.balance.workload import TOKENS
from megappo.batch.fields import offsets_of
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import PreferenceBatch
from megappo.config.batching import BatchingConfig
from megappo.controller.preference import PreferenceTask
from megappo.observability.metrics import Metrics, values


@dataclass
class LastTokenScores:
    """A reward model whose score of a text is its last token; notes what it is given."""

    layout: RankLayout
    batches: list[PreferenceBatch] = field(default_factory=list)
    requests: list[UpdateRequest] = field(default_factory=list)

    def compute_scores(self, batches: Sequence[Any], plan: Any) -> list[np.ndarray]:
        for batch, micro_batches in zip(batches, plan, strict=True):
            assert sorted(text for ids in micro_batches for text in ids) == sorted(batch.sequence_ids.tolist())
        return [batch.tokens[batch.offsets[1:] - 2].astype(np.float32) for batch in batches]

    def update(self, batches: Sequence[Any], requests: Sequence[UpdateRequest]) -> Metrics:
        self.batches, self.requests = list(batches), list(requests)
        return {}

    def save(self, folder: str, *, asynchronous: bool = False) -> Any:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        raise NotImplementedError


def pairs_of(texts: list[list[int]], margins: list[float]) -> PreferenceBatch:
    return PreferenceBatch(
        offsets=offsets_of([len(text) + 1 for text in texts]),
        tokens=np.array([token for text in texts for token in (*text, 0)], np.int32),
        sequence_ids=np.arange(len(texts)),
        pair_ids=np.repeat(np.arange(len(margins)), 2),
        is_chosen=np.tile([True, False], len(margins)),
        margins=np.repeat(np.array(margins, np.float32), 2),
    )


PAIRS = pairs_of([[5, 2], [1], [3], [9, 9, 4], [7], [7], [2, 2], [1]], [0, 0, 0, 1])


def task_of(layout: RankLayout, max_tokens: int = 1000) -> tuple[PreferenceTask, LastTokenScores]:
    model = LastTokenScores(layout)
    task = PreferenceTask(
        PAIRS,
        PAIRS,
        model=model,
        put=lambda batch: cast(Any, batch),
        batching=BatchingConfig(micro_batch_tokens=max_tokens),
        workload=TOKENS,
    )
    return task, model


@pytest.mark.parametrize("layout", [RankLayout(), RankLayout(data=3), RankLayout(pipeline=2)])
def test_validation_does_not_depend_on_the_layout(layout: RankLayout) -> None:
    # Scores 2 to 1, 3 to 4, 7 to 7, and 2 to 1 by a margin of 1.
    losses = [math.log1p(math.exp(-1)), math.log1p(math.exp(1)), math.log(2), math.log(2)]
    found = values(task_of(layout)[0].validate())
    assert found == pytest.approx(
        {
            "reward_model/val_accuracy": 2 / 4,
            "reward_model/val_loss": sum(losses) / 4,
            "reward_model/val_difference/mean": 1 / 4,
        }
    )


@pytest.mark.parametrize("data", [1, 2, 4])
def test_both_texts_of_a_pair_are_in_one_micro_batch_and_each_pair_weighs_the_same(data: int) -> None:
    task, model = task_of(RankLayout(data=data), max_tokens=7)
    task.update(np.array([0, 1, 3]))
    trained = []
    for batch, request in zip(model.batches, model.requests, strict=True):
        (step,) = request.mini_batches
        for ids in step.micro_batches:
            assert all(ids[place] + 1 == ids[place + 1] for place in range(0, len(ids), 2))
            trained += ids[::2]
        assert sorted(step.loss_weights) == sorted(batch.sequence_ids.tolist())
        assert set(step.loss_weights.values()) <= {1 / 3}
    assert sorted(trained) == [0, 2, 6]


def test_nothing_held_out_measures_nothing() -> None:
    model, batching = LastTokenScores(RankLayout()), BatchingConfig()
    task = PreferenceTask(
        PAIRS, None, model=model, put=lambda batch: cast(Any, batch), batching=batching, workload=TOKENS
    )
    assert task.validate() == {}
