"""What a step with a non-finite gradient does: nothing, visibly."""

from pathlib import Path

import pytest

from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig, ScheduleKind
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.jobs import spoil_steps

OPTIM = OptimConfig(lr=1e-2, schedule=ScheduleKind.linear, decay_steps=10, max_skipped_steps=3)
DISTRIBUTED = OptimConfig(
    lr=1e-2, schedule=ScheduleKind.linear, decay_steps=10, max_skipped_steps=3, distributed=True, clip_grad=0.0
)
OVERLAPPED = OptimConfig(
    lr=1e-2,
    schedule=ScheduleKind.linear,
    decay_steps=10,
    max_skipped_steps=3,
    distributed=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)


@pytest.mark.parametrize(
    ("layout", "data", "optim", "dtype"),
    [
        (ParallelismConfig(), 1, OPTIM, Dtype.float32),
        (ParallelismConfig(), 1, OPTIM, Dtype.bfloat16),
        (ParallelismConfig(tensor=2, sequence=True), 1, OPTIM, Dtype.float32),
        (ParallelismConfig(pipeline=2), 1, OPTIM, Dtype.float32),
        (ParallelismConfig(), 2, OPTIM, Dtype.float32),
        (ParallelismConfig(), 2, DISTRIBUTED, Dtype.float32),
        (ParallelismConfig(tensor=2), 2, OVERLAPPED, Dtype.bfloat16),
    ],
    ids=[
        "one process",
        "bf16",
        "tensor",
        "pipeline",
        "data",
        "distributed optimizer",
        "tensor, data, bf16, overlapped",
    ],
)
def test_a_non_finite_gradient_on_one_rank_leaves_all_ranks_as_they_were(
    world: DistWorld, policy_folder: Path, layout: ParallelismConfig, data: int, optim: OptimConfig, dtype: Dtype
) -> None:
    size = layout.model_size * data
    results = world.run(
        spoil_steps,
        world_size=size,
        parallelism=layout,
        folder=str(policy_folder),
        layout=layout,
        optim=optim,
        dtype=dtype,
    )
    for result in results:
        assert result["untouched"]
        assert result["moved"]
        # Steps 1 and 2 were applied: the skipped one between them is no step of the schedule.
        assert result["steps"] == 2
        assert result["error"] is not None and "3 optimizer steps in a row" in result["error"]
        assert "optim.max_skipped_steps=3" in result["error"]
    reported = [result for result in results if result["skipped"]]
    assert len(reported) == data
    for result in reported:
        assert result["skipped"]["actor/skipped_steps"] == 1
        assert "actor/grad_norm" not in result["skipped"]  # the mean of no applied step is absent
        assert result["skipped"]["actor/lr"] == pytest.approx(1e-2 * 8 / 9)  # what step 2 would have had
        assert result["recovered"]["actor/lr"] == pytest.approx(1e-2 * 8 / 9)
        assert result["recovered"]["actor/skipped_steps"] == 1
