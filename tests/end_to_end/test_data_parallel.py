"""The same step on real Ray and Megatron with two data-parallel ranks and with two tensor-parallel ranks."""

import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run

SAME = ("reward/mean", "rollout/response_tokens/mean", "actor/advantages/max", "actor/advantages/min")
CLOSE = ("actor/loss/mean", "actor/grad_norm", "actor/entropy/mean", "actor/approx_kl", "actor/ratio/max")


def finished_step(launch: Launch, name: str, *layout: str) -> dict[str, float]:
    run = launch(
        "train",
        name,
        "experiment=quickstart",
        "rollout=hf",
        "trainer.total_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "tracking.mlflow=false",
        "data.validation.size=5510",
        "batching.micro_batch_tokens=700",
        *layout,
    )
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    (line,) = run.metrics()
    return line


def test_two_data_parallel_ranks_give_the_numbers_of_two_tensor_parallel_ranks(launch: Launch, sft_run: Run) -> None:
    tensor = finished_step(launch, "tp2", "actor.parallelism.tensor=2")
    data = finished_step(launch, "dp2", "actor.parallelism.tensor=1")
    assert data["schedule/imbalance"] < 0.01
    for name in SAME:
        assert data[name] == tensor[name], name
    for name in CLOSE:
        assert data[name] == pytest.approx(tensor[name], rel=1e-4, abs=1e-6), name
