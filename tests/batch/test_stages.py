from dataclasses import fields

import numpy as np
import pytest

from megappo.batch.fields import Dims, PackedBatch, concat, empty, select
from megappo.batch.stages import BegunBatch, Experience, RolloutBatch, TokenField

STAGES = [RolloutBatch, BegunBatch, Experience, TokenField]


def filled(stage: type[PackedBatch], *, optional: bool) -> PackedBatch:
    """A batch of two sequences of 1 and 2 tokens with every field set to 1."""
    values = {"offsets": np.array([0, 1, 3])}
    for declared in fields(stage):  # type: ignore[arg-type]  # stages are dataclasses
        if "dims" in declared.metadata and (optional or declared.default is not None):
            size = 3 if declared.metadata["dims"] is Dims.tokens else 2
            values[declared.name] = np.ones(size, dtype=declared.metadata["dtype"])
    return stage(**values)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optional", [False, True])
def test_every_stage_validates_and_selects_all_its_fields(stage, optional):
    batch = filled(stage, optional=optional)
    batch.validate()
    chosen = select(batch, [1])
    chosen.validate()
    assert (chosen.num_sequences, chosen.num_tokens) == (1, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_batch_of_any_stage_joins_others(stage):
    nothing = empty(stage)
    nothing.validate()
    assert nothing.num_sequences == 0
    joined = concat([nothing, filled(stage, optional=False), nothing])
    assert (joined.num_sequences, joined.num_tokens) == (2, 3)


def test_experience_needs_advantages_and_a_loss_mask():
    rollouts = filled(RolloutBatch, optional=False)
    shared = {declared.name: getattr(rollouts, declared.name) for declared in fields(RolloutBatch)}
    with pytest.raises(TypeError, match="loss_mask"):
        Experience(**shared)


def test_the_example_of_the_documentation_is_valid():
    batch = RolloutBatch(
        offsets=np.array([0, 3]),
        tokens=np.array([5, 6, 7], np.int32),
        response_mask=np.array([False, True, True]),
        rollout_log_probs=np.array([0, -0.1, -0.2], np.float32),
        sequence_ids=np.array([0]),
        group_ids=np.array([0]),
    )
    batch.validate()
