"""The shared world of distributed tests behaves as its docstring says."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.parallelism import ParallelismConfig
from tests.device.idle_jobs import process_id, sleep_forever
from tests.dist_world import DistWorld, RankError


def coordinates(offset: int) -> tuple[int, int, int, int]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        int(total),
    )


def fail_on_rank_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()
    return 0


def test_ranks_of_every_layout_are_in_megatron_order(world: DistWorld) -> None:
    tensor = world.run(coordinates, parallelism=ParallelismConfig(tensor=2), offset=10)
    assert tensor == [(0, 0, 0, 21), (1, 0, 0, 21)]
    pipeline = world.run(coordinates, world_size=4, parallelism=ParallelismConfig(pipeline=2), offset=0)
    assert pipeline == [(0, 0, 0, 6), (0, 0, 1, 6), (0, 1, 0, 6), (0, 1, 1, 6)]


def test_an_exception_comes_back_with_rank_and_traceback_and_the_world_lives_on(world: DistWorld) -> None:
    before = world.run(process_id, world_size=2)
    with pytest.raises(RankError, match="rank 1 of 2") as error:
        world.run(fail_on_rank_one, world_size=2, parallelism=ParallelismConfig())
    assert "broken on purpose" in str(error.value) and "fail_on_rank_one" in str(error.value)
    assert world.run(process_id, world_size=2) == before


def test_a_job_past_its_deadline_ends_the_processes_and_the_next_job_runs_in_new_ones() -> None:
    own = DistWorld(imported=())
    try:
        before = own.run(process_id)
        with pytest.raises(RankError, match="no answer before the deadline"):
            own.run(sleep_forever, timeout_s=1.0)
        assert own.run(process_id) != before
    finally:
        own.stop()
