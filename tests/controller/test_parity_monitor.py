"""The parity monitor in the loop: silent on a clean run; warns, writes down and stops on engines that are wrong."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.algo.diagnostics import SequenceGaps
from megappo.config.algorithm import AlgorithmConfig, OldLogProbs
from megappo.config.batching import BatchingConfig
from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.rollout import SamplingConfig
from megappo.config.run import RunConfig
from megappo.controller.comparison import StepComparison
from megappo.controller.loop import PPOController
from megappo.controller.parity import broken_limits
from megappo.controller.ports import Draw, FinishedGroup, SequenceInfo
from megappo.controller.record import RecordSink, StepRecorder
from megappo.errors import ParityError
from tests.controller.test_loop import grpo, make_config, make_controller
from tests.fakes.bigram_rollout import FakeAnswer, FakeRollout
from tests.fakes.one_process import FakeActor

TIGHT = ParityConfig(warn=ParityLimits(max=1e-4), stop=ParityLimits())
"""The fakes agree to 1e-6."""


@dataclass
class WrongRollout(FakeRollout):
    """An engine that samples some rows of the data with weights of its own, or everything at another temperature."""

    rows: Sequence[int] = ()
    temperature: float | None = None
    old: int = 0
    """How many versions the sequences of those rows claim to be old."""

    def _advance(self, draw: Draw, answers: dict[int, FakeAnswer], sampling: SamplingConfig, random: Any) -> None:
        right = self.table
        if self.temperature is not None:
            sampling = replace(sampling, temperature=self.temperature)
        elif draw.prompt.row in self.rows:
            self.table = right + torch.linspace(0, 1.5, right.shape[1])
        super()._advance(draw, answers, sampling, random)
        self.table = right

    def _finish(self, draw: Draw, answers: dict[int, FakeAnswer]) -> FinishedGroup:
        group = super()._finish(draw, answers)
        if draw.prompt.row not in self.rows:
            return group
        infos = [info._replace(policy_version=info.policy_version - self.old) for info in group.sequences]
        return replace(group, sequences=infos)


def watched(config: RunConfig, tmp_path: Path, **wrong: Any) -> tuple[PPOController, list[str], list[dict[str, float]]]:
    """Return a controller whose engine is wrong in the given way, the warnings and the metrics of its steps."""
    controller, recorder = make_controller(config, tmp_path, data=2)
    parts = controller.parts
    rollout = WrongRollout(table=torch.zeros_like(parts.rollout.table), **wrong)  # type: ignore[attr-defined]
    parts.rollout = parts.step_sampler._rollout = parts.weight_sync.rollout = rollout  # type: ignore[attr-defined]
    warnings: list[str] = []
    sink = RecordSink(
        folder=tmp_path / "records", warn=warnings.append, decode=lambda tokens: "-".join(map(str, tokens))
    )
    parts.recorder = StepRecorder(config, sink, actor=parts.actor, critic=parts.critic)
    return controller, warnings, recorder.steps


def dumps(tmp_path: Path) -> list[Path]:
    """The sequences of each record that are written for reading, in order of the steps."""
    return sorted((tmp_path / "records").glob("step_*/parity.json"))


def run(controller: PPOController) -> None:
    controller.prepare()
    controller.fit()


def config_with(parity: ParityConfig, *, steps: int = 2, algorithm: AlgorithmConfig | None = None) -> RunConfig:
    config = make_config(algorithm or grpo(), steps=steps)
    config.rollout.parity = parity
    return config


def test_a_clean_run_says_nothing_and_writes_nothing(tmp_path: Path) -> None:
    controller, warnings, steps = watched(config_with(TIGHT), tmp_path)
    run(controller)
    assert warnings == [] and not (tmp_path / "records").exists()
    for step in steps:
        assert 0 <= step["actor/rollout_log_prob_diff/mean"] <= step["actor/rollout_log_prob_diff/max"] < 1e-6
        assert step["actor/rollout_log_prob_diff/compared_ratio"] == 1
        assert step["correction/probability_pearson_r"] == pytest.approx(1, abs=1e-9)


def test_a_wrong_temperature_warns_in_one_line_per_step(tmp_path: Path) -> None:
    controller, warnings, steps = watched(config_with(TIGHT, steps=3), tmp_path, temperature=0.7)
    run(controller)
    assert [line.split(":")[0] for line in warnings] == ["step 1", "step 2", "step 3"]
    assert all("\n" not in line and "rollout.parity.warn.max=0.0001" in line for line in warnings)
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == [f"step_00000{n}" for n in (1, 2, 3)]
    assert len(steps) == 3 and all(step["actor/rollout_log_prob_diff/mean"] > 0.05 for step in steps)


def test_the_dump_holds_the_sequences_of_wrong_weights_as_both_sides_saw_them(tmp_path: Path) -> None:
    wrong_rows = (2, 5, 7, 11)
    controller, warnings, _ = watched(config_with(TIGHT, steps=3), tmp_path, rows=wrong_rows)
    controller.prepare()
    actor = controller.parts.actor
    assert isinstance(actor, FakeActor)
    table = actor.table.detach().clone()
    controller.fit()
    assert warnings, "twelve rows, four to a step: all are seen in three steps"
    for path in dumps(tmp_path):
        dump = json.loads(path.read_text())
        assert {sequence["row"] for sequence in dump["sequences"]} <= set(wrong_rows)
        assert len(dump["sequences"]) == 4
        assert dump["trainer_version"] == dump["step"] - 1 and dump["max"] > 1e-4
    first = json.loads(dumps(tmp_path)[0].read_text())
    assert first["step"] == 1
    sequence = first["sequences"][0]
    tokens = [*sequence["prompt_tokens"], *sequence["response_tokens"]]
    prompt = len(sequence["prompt_tokens"])
    log_softmax = torch.log_softmax(table, dim=-1)
    expected = [float(log_softmax[tokens[t - 1], tokens[t]]) for t in range(prompt, len(tokens))]
    assert sequence["training_log_probs"] == pytest.approx(expected, abs=1e-6)
    sampled = torch.log_softmax(table + torch.linspace(0, 1.5, len(table)), dim=-1)
    expected = [float(sampled[tokens[t - 1], tokens[t]]) for t in range(prompt, len(tokens))]
    assert sequence["rollout_log_probs"] == pytest.approx(expected, abs=1e-6)
    assert sequence["response"] == "-".join(map(str, sequence["response_tokens"]))
    size = np.abs(np.subtract(sequence["training_log_probs"], sequence["rollout_log_probs"]))
    assert sequence["worst_token"] == size.argmax() and size.max() == pytest.approx(first["max"], abs=1e-6)


def test_a_stop_ends_the_run_before_the_update_and_says_all_there_is(tmp_path: Path) -> None:
    parity = ParityConfig(warn=ParityLimits(mean=0.01), stop=ParityLimits(mean=0.05), dump=2, dump_files=1)
    controller, warnings, _ = watched(config_with(parity), tmp_path, temperature=0.3)
    with pytest.raises(ParityError) as error:
        run(controller)
    actor = controller.parts.actor
    assert isinstance(actor, FakeActor) and actor.updates == 0 and warnings == []
    dump = json.loads(dumps(tmp_path)[0].read_text())
    text = str(error.value)
    assert text.startswith("step 1: log-probs of engine and trainer are too far apart: mean ")
    for expected in (
        "rollout.parity.stop.mean=0.05",
        f"mean {dump['mean']:.3g}, max {dump['max']:.3g} nats, r ",
        *(f"sequence {sequence['sequence_id']} (group " for sequence in dump["sequences"]),
        "records/step_000001",
        "temperature",
        "dtype",
        "versions",
    ):
        assert expected in text, expected
    assert len(dump["sequences"]) == 2


def test_what_older_weights_sampled_is_not_compared(tmp_path: Path) -> None:
    rows = tuple(range(6))
    controller, warnings, steps = watched(config_with(TIGHT, steps=3), tmp_path, rows=rows, old=1)
    run(controller)
    assert warnings == []
    shares = [step["actor/rollout_log_prob_diff/compared_ratio"] for step in steps]
    assert 0 < np.mean(shares) < 1
    assert any(step["correction/k3"] > 1e-3 for step in steps), "their distance is still in what the correction sees"


def single_step(**keys: Any) -> RunConfig:
    """A run of which each step is one optimizer step, so that `auto` skips the pass before the update."""
    config = config_with(TIGHT, algorithm=replace(grpo(), **keys))
    config.batching = BatchingConfig(prompts_per_step=4, samples_per_prompt=4)
    return config


@pytest.mark.parametrize("old_log_probs", [OldLogProbs.auto, OldLogProbs.rollout])
def test_without_a_pass_before_it_the_update_measures(old_log_probs: OldLogProbs, tmp_path: Path) -> None:
    controller, warnings, steps = watched(single_step(old_log_probs=old_log_probs), tmp_path / "clean")
    run(controller)
    assert warnings == []
    assert all(0 <= step["actor/rollout_log_prob_diff/max"] < 1e-6 for step in steps)
    assert all("actor/rollout_log_prob_diff/compared_ratio" not in step for step in steps)

    config = single_step(old_log_probs=old_log_probs)
    controller, warnings, _ = watched(config, tmp_path / "wrong", temperature=0.7)
    run(controller)
    assert len(warnings) == 2 and "algorithm.old_log_probs=recompute" in warnings[0]
    config.rollout.parity = ParityConfig(stop=ParityLimits(mean=0.05))
    controller, _, _ = watched(config, tmp_path / "worse", temperature=0.3)
    with pytest.raises(ParityError, match=r"step 1: .*rollout.parity.stop.mean=0.05"):
        run(controller)


def test_an_update_on_stale_rollouts_measures_nothing_rather_than_staleness(tmp_path: Path) -> None:
    config = single_step(old_log_probs=OldLogProbs.rollout)
    controller, warnings, steps = watched(config, tmp_path, rows=tuple(range(12)), old=1)
    run(controller)
    assert warnings == []
    assert all("actor/rollout_log_prob_diff/mean" not in step for step in steps)


@pytest.mark.parametrize(
    ("parity", "files", "said"),
    [
        (replace(TIGHT, dump=0), 0, "no record: rollout.parity.dump=0"),
        (replace(TIGHT, dump_files=1), 1, "no record: rollout.parity.dump_files=1 are in"),
        (replace(TIGHT, dump_tokens=1), 3, "records/step_000003"),
    ],
)
def test_the_size_of_dumps_is_bounded(parity: ParityConfig, files: int, said: str, tmp_path: Path) -> None:
    controller, warnings, _ = watched(config_with(parity, steps=3), tmp_path, temperature=0.7)
    run(controller)
    assert said in warnings[-1]
    paths = dumps(tmp_path)
    assert len(paths) == files
    for path in paths if parity.dump_tokens == 1 else []:
        for sequence in json.loads(path.read_text())["sequences"]:
            assert "response_tokens" not in sequence and sequence["num_response_tokens"] > 0


def comparison(total: list[float], largest: list[float], tokens: list[int]) -> StepComparison:
    infos = [
        SequenceInfo(
            sequence_id=10 + index,
            group_id=0,
            prompt_tokens=1,
            response_tokens=count,
            finish_reason="stop",
            policy_version=0,
            row=index,
        )
        for index, count in enumerate(tokens)
    ]
    gaps = SequenceGaps(tokens=np.array(tokens), total=np.array(total), largest=np.array(largest))
    return StepComparison(step=1, version=0, sequences=infos, gaps=gaps, pearson_r=None)


def test_the_worst_are_ranked_by_what_was_exceeded() -> None:
    found = comparison([4.0, 3.0, 0.0, 2.0], [0.5, 3.0, 0.0, 0.6], [8, 30, 0, 2])
    assert found.worst(9, by_mean=True) == [3, 0, 1], "means 1, .5, .1; nothing was compared of the third"
    assert found.worst(2, by_mean=False) == [1, 3]
    assert (found.mean, found.largest) == (9 / 40, 3.0)
    broken = comparison([1.0, np.nan], [1.0, np.nan], [1, 1])
    assert broken.worst(1, by_mean=True) == broken.worst(1, by_mean=False) == [1]
    assert len(broken_limits(ParityLimits(mean=1e9, max=1e9), "stop", mean=broken.mean, largest=broken.largest)) == 2
    assert broken_limits(ParityLimits(), "stop", mean=np.nan, largest=np.nan) == []
