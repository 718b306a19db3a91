"""The same step on real Ray and Megatron with two tensor-, two data- and two context-parallel ranks."""

import pytest

from tests.end_to_end.conftest import START_TIMEOUT_S, Launch, Run

SAME = ("reward/mean", "rollout/response_tokens/mean", "actor/advantages/max", "actor/advantages/min")
CLOSE = ("actor/loss/mean", "actor/grad_norm", "actor/entropy/mean", "actor/approx_kl", "actor/ratio/max")


def first_step(launch: Launch, name: str, *layout: str, steps: int = 1) -> dict[str, float]:
    run = launch(
        "train",
        name,
        "experiment=quickstart",
        "rollout=hf",
        f"trainer.total_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "tracking.trackers=[]",
        "data.validation.size=5510",
        "batching.micro_batch_tokens=700",
        *layout,
    )
    assert run.wait(START_TIMEOUT_S) == 0, run.output
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    # After the first step this holds only for weights that the engine got from the trainer.
    assert max(line["actor/rollout_log_prob_diff/max"] for line in lines) <= 1e-4
    return lines[0]


@pytest.fixture(scope="module")
def tensor_step(launch: Launch, sft_run: Run) -> dict[str, float]:
    return first_step(launch, "tp2", "actor.parallelism.tensor=2")


def assert_same_step(step: dict[str, float], expected: dict[str, float]) -> None:
    for name in SAME:
        assert step[name] == expected[name], name
    for name in CLOSE:
        assert step[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_two_data_parallel_ranks_give_the_numbers_of_two_tensor_parallel_ranks(
    launch: Launch, tensor_step: dict[str, float]
) -> None:
    step = first_step(launch, "dp2", "actor.parallelism.tensor=1")
    assert step["schedule/imbalance"] < 0.01
    assert_same_step(step, tensor_step)


@pytest.mark.slow
def test_two_context_parallel_ranks_give_the_numbers_of_two_tensor_parallel_ranks(
    launch: Launch, tensor_step: dict[str, float]
) -> None:
    step = first_step(launch, "cp2", "actor.parallelism.tensor=1", "actor.parallelism.context=2", steps=2)
    assert_same_step(step, tensor_step)
