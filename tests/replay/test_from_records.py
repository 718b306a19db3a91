"""What is computed from a record without a model: the experience, and who does what on another layout."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megappo.balance.layout import RankLayout
from megappo.balance.workload import TOKENS
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import TokenField
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig, KLConfig, KLInRewardConfig
from megappo.config.record import RecordConfig
from megappo.controller.record_folder import StepRecord, read_record
from megappo.errors import RecordError
from megappo.observability.metrics import values
from megappo.replay.advantages import rebuild_experience
from megappo.replay.differences import compare_field, compare_number
from megappo.replay.plans import RecordedWork
from tests.controller.test_loop import grpo, ppo_with_kl
from tests.controller.test_one_step_off import CORRECTED
from tests.controller.test_record import recording, run

IN_REWARD = KLConfig(in_reward=KLInRewardConfig(coef=0.05))


def record_of(algorithm: AlgorithmConfig, folder: Path) -> StepRecord:
    """Step 2 of a run on two data-parallel ranks."""
    controller, said, _ = recording(RecordConfig(steps=[2]), folder, steps=2, algorithm=algorithm)
    run(controller)
    assert said == []
    return read_record(folder / "records" / "step_000002")


@pytest.mark.parametrize(
    "algorithm",
    [
        grpo(),
        ppo_with_kl(),
        CORRECTED,
        replace(grpo(), kl=IN_REWARD, mask_truncated=True),
        AlgorithmConfig(advantage=AdvantageConfig(name="remax")),
        AlgorithmConfig(advantage=AdvantageConfig(name="reinforce_plus_plus")),
    ],
    ids=["grpo", "gae, KL in reward", "correction", "truncated answers masked", "remax", "reinforce++"],
)
def test_the_experience_of_a_run_comes_out_bitwise(algorithm: AlgorithmConfig, tmp_path: Path) -> None:
    record = record_of(algorithm, tmp_path)
    rebuilt = rebuild_experience(record, algorithm)
    assert np.array_equal(rebuilt.token_rewards.values, record.token_rewards.values)
    for name in ("sequence_ids", "advantages", "returns", "loss_mask", "correction_weights"):
        ours, recorded = getattr(rebuilt.experience, name), getattr(record.experience, name)
        assert (ours is None) == (recorded is None)
        assert ours is None or np.array_equal(ours, recorded), name
    assert rebuilt.whitening == record.requests["actor"][0].whitening
    recorded_metrics = values(record.metrics["experience"])
    assert {name: recorded_metrics[name] for name in values(rebuilt.metrics)} == values(rebuilt.metrics)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> StepRecord:
    return record_of(grpo(), tmp_path_factory.mktemp("record"))


def test_an_estimator_that_reads_what_no_record_holds_is_refused(record: StepRecord) -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="optimal_token_baseline"))
    with pytest.raises(RecordError, match=r"advantage.name=optimal_token_baseline reads the sum of squared"):
        rebuild_experience(record, algorithm)


def work(record: StepRecord, **layout: int) -> RecordedWork:
    batching = recording(RecordConfig(), Path("unused"))[0].parts.config.batching
    return RecordedWork(record, RankLayout(**layout), batching=batching, workload=TOKENS)


def test_on_the_layout_of_the_record_work_is_cut_as_it_was(record: StepRecord) -> None:
    assert work(record, data=2).requests("actor") == record.requests["actor"]


@pytest.mark.parametrize("layout", [{"data": 1}, {"data": 3}, {"data": 4}, {"pipeline": 2}])
def test_another_layout_has_the_same_mini_batches_with_the_same_weights(
    layout: dict[str, int], record: StepRecord
) -> None:
    cut = work(record, **layout)
    everyone = sorted(record.experience.sequence_ids.tolist())
    assert sorted(chain.from_iterable(chain.from_iterable(cut.pass_plan()))) == everyone
    requests = cut.requests("actor")
    assert len(requests) == layout.get("data", 1)
    for index in range(2):
        assert weights_of(requests, index) == weights_of(record.requests["actor"], index)
    for rank, request in enumerate(requests):
        mine = {int(record.experience.sequence_ids[row]) for row in cut.parts[rank]}
        assert set(chain(*(batch.loss_weights for batch in request.mini_batches))) <= mine
        assert request.whitening == record.requests["actor"][0].whitening and request.epochs == 2
    counts = {len(batch.micro_batches) for request in requests for batch in request.mini_batches}
    assert min(counts) >= (4 if "pipeline" in layout else 1)


def weights_of(requests: list[UpdateRequest], index: int) -> dict[int, float]:
    return {key: weight for part in requests for key, weight in part.mini_batches[index].loss_weights.items()}


def test_numbers_agree_relative_to_their_size_and_when_both_are_no_numbers() -> None:
    def agrees(recorded: float, replayed: float) -> bool:
        return compare_number("x", recorded, replayed, tolerance=1e-3).agrees

    assert agrees(1000.0, 1000.9) and not agrees(1000.0, 1001.1)
    assert agrees(0.0, 9e-4) and not agrees(0.0, 2e-3)
    assert agrees(np.nan, np.nan) and agrees(np.inf, np.inf)
    assert not agrees(np.nan, 1.0) and not agrees(np.inf, -np.inf) and not agrees(1.0, np.inf)
    assert compare_number("x", None, 3.0, tolerance=0.0).agrees


def test_the_worst_token_is_found_in_any_order_of_the_replay(record: StepRecord) -> None:
    experience = record.experience
    assert experience.old_log_probs is not None
    changed = experience.old_log_probs.copy()
    index = int(experience.offsets[4]) - 1  # last token of the fourth sequence
    changed[index] += 0.5
    order = np.arange(experience.num_sequences)[::-1]
    parts = np.split(changed, experience.offsets[1:-1])
    offsets = np.concatenate([[0], np.cumsum(experience.lengths[order])])
    replayed = TokenField(
        offsets=offsets,
        values=np.concatenate([parts[row] for row in order]),
        sequence_ids=experience.sequence_ids[order],
    )
    found = compare_field(
        record, "old_log_probs", experience.old_log_probs, replayed, tolerance=1e-5, decode=lambda ids: f"<{ids[0]}>"
    )
    assert found.worst is not None and not found.agrees
    assert found.worst.sequence_id == experience.sequence_ids[3]
    assert found.worst.position == experience.lengths[3] - 1
    assert found.worst.text == f"<{experience.tokens[index]}>"
    assert found.largest == pytest.approx(0.5, abs=1e-6)
