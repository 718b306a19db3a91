"""Records of steps: when they are made, that they hold the step as it was, and that a reader notices damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.balance.layout import RankLayout
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.record import RecordConfig, RecordTrigger
from megappo.controller.loop import PPOController
from megappo.controller.record import RecordSink, StepRecorder, non_finite
from megappo.controller.record_folder import StepRecord, read_record
from megappo.errors import NonFiniteError, ParityError, RecordError
from megappo.observability.metrics import Metrics, maximum, mean, values
from megappo.rewards.types import Reward, Sample
from megappo.weights.checksums import checksum
from tests.controller.test_loop import grpo, make_config, make_controller, ppo_with_kl, share_of_threes
from tests.controller.test_parity_monitor import WrongRollout
from tests.fakes.one_process import FakeActor


def recording(
    record: RecordConfig, tmp_path: Path, *, steps: int = 3, algorithm: AlgorithmConfig | None = None, **parity: Any
) -> tuple[PPOController, list[str], list[dict[str, float]]]:
    """Return a controller that records, what it says, and the metrics of its steps."""
    config = make_config(algorithm or ppo_with_kl(), steps=steps)
    config.batching.mini_batch_prompts = 2
    config.record = record
    config.rollout.parity = ParityConfig(**parity)
    controller, recorder = make_controller(config, tmp_path, data=2)
    said: list[str] = []
    sink = RecordSink(
        folder=tmp_path / "records", checkpoints=tmp_path / "checkpoints", config="seed: 0\n", warn=said.append
    )
    parts = controller.parts
    parts.recorder = StepRecorder(config, sink, actor=parts.actor, critic=parts.critic)
    return controller, said, recorder.steps


def run(controller: PPOController) -> None:
    controller.prepare()
    controller.fit()


def actor_of(controller: PPOController) -> FakeActor:
    actor = controller.parts.actor
    assert isinstance(actor, FakeActor)
    return actor


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "records").glob("*"))


def test_by_default_nothing_is_recorded_and_no_tokens_come_to_the_controller(tmp_path: Path) -> None:
    controller, said, _ = recording(RecordConfig(), tmp_path)
    run(controller)
    assert said == [] and names(tmp_path) == []
    assert "read sequences" not in actor_of(controller).phases


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PPOController, list[dict[str, float]]]:
    """A run of three steps with a critic and KL in reward on two data-parallel ranks, of which step 2 is recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    controller, said, steps = recording(RecordConfig(steps=[2], weights=True), folder)
    run(controller)
    assert said == []
    return folder / "records" / "step_000002", controller, steps


def test_a_record_holds_every_number_of_its_step(
    recorded: tuple[Path, PPOController, list[dict[str, float]]],
) -> None:
    folder, _, steps = recorded
    record = read_record(folder)
    assert names(folder.parent.parent) == ["step_000002"]
    assert (record.step, record.version, record.reasons, record.is_whole) == (2, 1, ["record.steps"], True)
    assert record.layouts == {"actor": RankLayout(data=2), "critic": RankLayout()}
    assert record.config == "seed: 0\n" and "numpy" in json.loads((folder / "versions.json").read_text())
    assert len(record.sequences) == len(record.rewards) == 16
    experience = record.experience
    experience.validate()
    record.token_rewards.validate()
    ids = [info.sequence_id for info in record.sequences]
    assert experience.sequence_ids.tolist() == record.token_rewards.sequence_ids.tolist() == ids
    assert sorted(key for shard in record.shards for key in shard) == sorted(ids) == list(range(16, 32))
    assert experience.lengths.tolist() == [info.length for info in record.sequences]
    assert record.current.all()
    # The scores lie on the last tokens; KL takes from every token what its coefficient says.
    expected = [
        reward.score - kl
        for reward, kl in zip(record.rewards, record.kl_coef * np.add.reduceat(penalty(record), starts(record)))
    ]
    totals = np.add.reduceat(record.token_rewards.values, starts(record))
    assert totals == pytest.approx(expected, abs=1e-6)
    reported = steps[1]
    for phase in ("experience", "actor", "critic"):
        for name, value in values(record.metrics[phase]).items():
            assert reported[name] == pytest.approx(value, rel=1e-12), name


def starts(record: StepRecord) -> np.ndarray:
    return record.experience.offsets[:-1]


def penalty(record: StepRecord) -> np.ndarray:
    """The default estimate of KL at every response token: old minus reference log-prob."""
    experience = record.experience
    assert experience.old_log_probs is not None and experience.ref_log_probs is not None
    return experience.old_log_probs.astype(np.float64) - experience.ref_log_probs


def test_a_record_holds_what_the_update_was_told(
    recorded: tuple[Path, PPOController, list[dict[str, float]]],
) -> None:
    record = read_record(recorded[0])
    assert {role: len(parts) for role, parts in record.requests.items()} == {"actor": 2, "critic": 1}
    for parts in record.requests.values():
        assert {part.epochs for part in parts} == {2}
        for index in range(2):
            weights = [pair for part in parts for pair in part.mini_batches[index].loss_weights.items()]
            lengths = {info.sequence_id: info.response_tokens for info in record.sequences}
            # token_mean: every loss token of the mini-batch has the same weight, and they sum to 1.
            assert len({weight for _, weight in weights}) == 1
            assert sum(weight * lengths[key] for key, weight in weights) == pytest.approx(1)
    whitening = record.requests["actor"][0].whitening
    mask = record.experience.response_mask
    assert whitening is not None and whitening.mean == pytest.approx(
        record.experience.advantages[mask].mean(), abs=1e-7
    )


def test_a_record_knows_the_weights_before_the_update(
    recorded: tuple[Path, PPOController, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, _, _ = recorded
    controller, _, _ = recording(RecordConfig(), tmp_path)
    actor = actor_of(controller)
    controller.prepare()
    tables: list[torch.Tensor] = []
    update = actor.update
    actor.update = lambda *call: [tables.append(actor.table.detach().clone()), update(*call)][1]  # type: ignore[method-assign]
    controller.fit()
    record = read_record(folder)
    assert torch.equal(torch.load(folder / "weights" / "actor" / "model.pt"), tables[1])
    reference = record.weights["actor"]
    assert reference.checksums == {"table": checksum(tables[1])} and reference.is_exported
    assert reference.checkpoint == str(folder.parent.parent / "checkpoints" / "step_000001")
    assert record.weights["critic"].is_exported
    # The log-probs of the record are those of these weights.
    experience = record.experience
    tokens = experience.tokens.astype(np.int64)
    previous = np.concatenate([[0], tokens[:-1]])
    expected = torch.log_softmax(tables[1], dim=-1).numpy()[previous, tokens]
    assert experience.old_log_probs is not None
    mask = experience.response_mask
    assert experience.old_log_probs[mask] == pytest.approx(expected[mask], abs=1e-6)


def nan_at(answer: int) -> Callable[[Sample], Reward]:
    """A reward that is NaN for one answer, counted from 0 (16 answers to a step)."""
    seen = iter(range(1_000_000))
    return lambda sample: Reward(score=float("nan")) if next(seen) == answer else share_of_threes(sample)


def test_a_step_that_goes_non_finite_is_recorded_with_the_weights_before_it(tmp_path: Path) -> None:
    controller, said, _ = recording(
        RecordConfig(when=[RecordTrigger.non_finite], weights=True), tmp_path, steps=2, algorithm=grpo()
    )
    controller.parts.reward.function = nan_at(16)  # type: ignore[attr-defined]
    run(controller)
    assert said == [] and names(tmp_path) == ["step_000002"]
    record = read_record(tmp_path / "records" / "step_000002")
    assert record.reasons[0].startswith("non_finite: actor/advantages/")
    assert sum(np.isnan(reward.score) for reward in record.rewards) == 1
    saved = torch.load(tmp_path / "records" / "step_000002" / "weights" / "actor" / "model.pt")
    assert saved.isfinite().all() and not actor_of(controller).table.isfinite().all()


def test_weights_that_an_update_left_alone_are_those_before_it(tmp_path: Path) -> None:
    record = RecordConfig(when=[RecordTrigger.non_finite], weights=True)
    controller, _, _ = recording(record, tmp_path, steps=2, algorithm=grpo())
    actor = actor_of(controller)
    outcomes = [mean(0, 0), mean(1.5, 1)]  # all of two optimizer steps were skipped, then one of them
    actor.update = lambda *_: {"actor/lr": mean(0.2, 2), "actor/grad_norm": outcomes.pop(0)}  # type: ignore[method-assign]
    run(controller)
    first, second = (read_record(tmp_path / "records" / f"step_00000{step}") for step in (1, 2))
    assert first.reasons == ["non_finite: actor: 100% of the optimizer steps were skipped"]
    assert first.weights["actor"].checksums == {"table": checksum(actor.table)} and first.weights["actor"].is_exported
    assert second.weights["actor"].checksums is None and not second.weights["actor"].is_exported


def test_the_number_of_records_is_bounded(tmp_path: Path) -> None:
    record = RecordConfig(when=[RecordTrigger.non_finite], steps=[4], max_records=2)
    controller, _, _ = recording(record, tmp_path, steps=4, algorithm=grpo())
    actor_of(controller).update = lambda *_: {"actor/loss/mean": mean(np.nan, 1)}  # type: ignore[method-assign]
    run(controller)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000004"]


def test_an_update_that_gives_up_leaves_a_record(tmp_path: Path) -> None:
    controller, _, _ = recording(RecordConfig(when=[RecordTrigger.non_finite]), tmp_path, steps=1, algorithm=grpo())
    actor = actor_of(controller)

    def give_up(*_: object) -> Metrics:
        raise NonFiniteError("10 optimizer steps in a row were skipped")

    actor.update = give_up  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError):
        run(controller)
    record = read_record(tmp_path / "records" / "step_000001")
    assert record.reasons == ["non_finite: 10 optimizer steps in a row were skipped"]
    assert record.weights["actor"].checksums is None, "the update may have changed the weights"
    assert set(record.requests) == {"actor"} and set(record.metrics) == {"experience"}


def test_skipped_optimizer_steps_and_numbers_that_are_none_are_non_finite() -> None:
    fine: Metrics = {"actor/lr": mean(0.2, 2), "actor/grad_norm": mean(3, 2), "actor/ratio/max": maximum(0, 0)}
    assert non_finite(fine) == []
    assert non_finite(fine | {"actor/grad_norm": mean(1.5, 1)}) == ["actor: 50% of the optimizer steps were skipped"]
    assert non_finite(fine | {"actor/loss/mean": mean(np.inf, 2)}) == ["actor/loss/mean=inf"]


@pytest.mark.parametrize(
    ("record", "limits", "is_whole"),
    [
        (RecordConfig(), {"warn": ParityLimits(max=1e-4), "stop": ParityLimits()}, False),
        (RecordConfig(when=[RecordTrigger.parity]), {"warn": ParityLimits(max=1e-4), "stop": ParityLimits()}, True),
        (RecordConfig(), {"stop": ParityLimits(mean=0.01)}, False),
        (RecordConfig(when=[RecordTrigger.parity]), {"stop": ParityLimits(mean=0.01)}, True),
    ],
)
def test_a_step_out_of_parity_leaves_its_worst_sequences_or_all(
    record: RecordConfig, limits: dict[str, ParityLimits], is_whole: bool, tmp_path: Path
) -> None:
    controller, said, _ = recording(record, tmp_path, steps=1, algorithm=grpo(), dump=3, **limits)
    parts = controller.parts
    rollout = WrongRollout(table=torch.zeros_like(parts.rollout.table), temperature=0.5)  # type: ignore[attr-defined]
    parts.rollout = parts.step_sampler._rollout = parts.weight_sync.rollout = rollout  # type: ignore[attr-defined]
    if "warn" in limits:
        run(controller)
        assert "record: " in said[0] and "step_000001" in said[0]
    else:
        with pytest.raises(ParityError, match=r"record: .*step_000001"):
            run(controller)
    found = read_record(tmp_path / "records" / "step_000001")
    assert found.is_whole == is_whole and found.reasons[0].startswith("parity: m")
    assert bool(found.requests) == (is_whole and "warn" in limits), "a stop comes before the update"
    assert (found.weights["actor"].checksums is not None) == is_whole
    view = json.loads((tmp_path / "records" / "step_000001" / "parity.json").read_text())
    worst = [sequence["sequence_id"] for sequence in view["sequences"]]
    assert len(worst) == 3
    ids = found.experience.sequence_ids.tolist()
    assert set(worst) <= set(ids) and len(ids) == (16 if is_whole else 3)


def test_a_record_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    controller, said, steps = recording(RecordConfig(steps=[1, 2]), tmp_path, steps=2, algorithm=grpo())
    (tmp_path / "records").write_text("a file is in the way")
    run(controller)
    assert len(steps) == 2 and [line.split(":")[0] for line in said] == ["step 1", "step 2"]
    assert all("no record was written" in line for line in said)


def test_a_record_replaces_one_of_an_earlier_run_of_that_step(tmp_path: Path) -> None:
    old = tmp_path / "records" / "step_000001"
    old.mkdir(parents=True)
    (old / "rest").touch()
    (tmp_path / "records" / "step_000001.writing").mkdir()
    controller, _, _ = recording(RecordConfig(steps=[1]), tmp_path, steps=1)
    run(controller)
    assert names(tmp_path) == ["step_000001"] and not (old / "rest").exists()
    assert read_record(old).step == 1


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "record.json").unlink(), "is no record of a step: it holds no record.json"),
        (lambda folder: (folder / "fields.npz").unlink(), "fields.npz is missing"),
        (damage("requests.json", lambda content: content[:-9]), "requests.json has "),
        (damage("fields.npz", lambda content: content[:500] + b"?" + content[501:]), "fields.npz has another checksum"),
        (damage("record.json", lambda content: content[:40]), "record.json cannot be read"),
        (
            damage("record.json", lambda content: b"[]"),
            "record.json cannot be read: .* no JSON object, but list",
        ),
        (damage("record.json", lambda content: b'{"format": 2}'), "record.json is damaged: its digest"),
        (
            damage("record.json", lambda content: content.replace(b'"reasons": [', b'"reasons": null, "x": [')),
            "record.json is damaged: its digest",
        ),
        (
            damage("record.json", lambda content: content.replace(b'"format": 2', b'"format": 9')),
            "has format 9, this megappo .* reads format 2",
        ),
    ],
)
def test_damage_is_named(
    spoil: Callable[[Path], object],
    message: str,
    recorded: tuple[Path, PPOController, list[dict[str, float]]],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "step_000002"
    shutil.copytree(recorded[0], folder)
    assert read_record(folder).step == 2
    spoil(folder)
    with pytest.raises(RecordError, match=message):
        read_record(folder)
