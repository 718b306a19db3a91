"""The reference policy stays what it was while the policy moves."""

from pathlib import Path

import numpy as np
import pytest

from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from tests.dist_world import DistWorld
from tests.train.batches import make_experience
from tests.train.jobs import follow_reference


@pytest.mark.parametrize("distributed", [False, True])
def test_reference_log_probs_do_not_move_and_leave_no_trace(
    world: DistWorld, policy_folder: Path, distributed: bool
) -> None:
    layout = ParallelismConfig(tensor=2)
    optim = OptimConfig(lr=1e-2, distributed=distributed)
    output, other = world.run(
        follow_reference, parallelism=layout, folder=str(policy_folder), layout=layout, optim=optim
    )
    assert output["weights kept"] and other["weights kept"]
    np.testing.assert_array_equal(output["reference before"], output["start"])
    np.testing.assert_array_equal(output["reference after"], output["start"])
    mask = make_experience().response_mask
    assert np.abs(output["now"] - output["start"])[mask].max() > 1e-2
    assert other["start"] is None
