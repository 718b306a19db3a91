"""Validation over the fakes: what is measured, and that training never notices."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
import pytest
import torch

from megappo.config.data import SourceConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.validation import SameAnswer, ValidationConfig
from megappo.controller.evaluate import Evaluation, evaluate
from megappo.controller.ports import Draw, FinishedGroup
from megappo.data.types import Prompt
from megappo.errors import DataError
from megappo.observability.metric_catalogue import MEASURED, undocumented
from megappo.observability.metrics import values
from megappo.rewards.types import FailureKind, Reward, Sample
from tests.controller.resumed_runs import CONFIGS, Killed, Started, resuming, start
from tests.controller.test_loop import PROMPTS
from tests.fakes.bigram_rollout import FakeAnswer, FakeRollout, as_ref
from tests.fakes.one_process import FakeReward

VOCAB = 6


def prompts_of(source: str, rows: int) -> list[Prompt]:
    return [
        Prompt(row=row, text=f"{source} {row}", tokens=[1 + row % 5], answer="3", source=source) for row in range(rows)
    ]


def config_of(**validation: object) -> RunConfig:
    sampling = SamplingConfig(max_new_tokens=4)
    return RunConfig(
        rollout=RolloutConfig(sampling=sampling, validation=sampling),
        validation=ValidationConfig(**{"samples_per_prompt": 4, **validation}),  # type: ignore[arg-type]
    )


def ask(
    config: RunConfig, sets: dict[str, list[Prompt]], reward: Callable[[Sample], Reward]
) -> tuple[Evaluation, FakeRollout]:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    rollout = FakeRollout(table=table, version=0)
    return evaluate(config, sets, rollout=rollout, reward=FakeReward(reward)), rollout


def last_token(sample: Sample) -> Reward:
    """1 if the last token is a 3; what is read is that token."""
    token = sample.response.split()[-1]
    return Reward(score=float(token == "3"), parts={"tokens": len(sample.response.split())}, extracted=token)


def test_a_set_is_measured_by_prompt_and_by_answer() -> None:
    config = config_of(pass_at=[1, 2, 4], majority=SameAnswer.extracted)
    evaluation, rollout = ask(config, {"": prompts_of("x", 30)}, last_token)
    (answered,) = evaluation.answered
    texts = [
        [answer.sample.response.split() for answer in prompt.answers if answer.sample] for prompt in answered.prompts
    ]
    assert {len(found) for found in texts} == {4}
    scores = np.array([[float(tokens[-1] == "3") for tokens in found] for found in texts])
    numbers = values(evaluation.metrics)
    assert numbers["val/reward/mean"] == pytest.approx(scores.mean())
    assert numbers["val/reward/best"] == pytest.approx(scores.max(axis=1).mean())
    assert numbers["val/reward/pass_at_1"] == pytest.approx(scores.mean())
    assert numbers["val/reward/pass_at_4"] == pytest.approx(scores.max(axis=1).mean())
    # Two of four answers: 6 pairs, of which C(wrong, 2) hold no correct one.
    wrong = 4 - scores.sum(axis=1)
    assert numbers["val/reward/pass_at_2"] == pytest.approx((1 - wrong * (wrong - 1) / 12).mean())
    assert scores.mean() < numbers["val/reward/pass_at_2"] < scores.max(axis=1).mean()
    lengths = np.array([len(tokens) for found in texts for tokens in found])
    assert numbers["val/response_tokens/mean"] == numbers["val/part/tokens/mean"] == lengths.mean()
    assert numbers["val/response_tokens/max"] == lengths.max() == 4
    ended = np.array([tokens[-1] == "0" for found in texts for tokens in found])
    assert numbers["val/truncated_ratio"] == (~ended).mean()
    for name in ("mean", "best", "majority", "pass_at_2"):
        middle, low, high = (numbers[f"val/reward/{name}{end}"] for end in ("", "/low", "/high"))
        assert low < middle < high
    assert not undocumented(evaluation.metrics)
    assert not rollout.stored and not rollout.begun, "the engines forget the answers"


class Told(FakeRollout):
    """Answers with given texts, by the row of the prompt."""

    texts: ClassVar[dict[int, list[str]]] = {0: ["b a", "B  A ", "c"], 1: ["c", "c", "b a"], 2: ["b", "c", ""]}

    def _finish(self, draw: Draw, answers: dict[int, FakeAnswer]) -> FinishedGroup:
        group = super()._finish(draw, answers)
        samples = zip(cast(list[Sample], group.samples), self.texts[draw.prompt.row])
        return replace(group, samples=as_ref([replace(sample, response=text) for sample, text in samples]))


@pytest.mark.parametrize(
    ("same", "majorities"),
    [
        (SameAnswer.response, [1.0, 0.0, 0.5]),  # twice "b a", twice "c", a tie: nothing has no vote
        (SameAnswer.extracted, [0.0, 0.0, 0.0]),  # only "c" can be read, and it is wrong
    ],
)
def test_the_majority_is_of_what_the_reward_read_or_of_the_text(same: SameAnswer, majorities: list[float]) -> None:
    def has_b(sample: Sample) -> Reward:
        return Reward(score=float("b" in sample.response.casefold()), extracted=sample.response.strip(" abAB"))

    evaluation = evaluate(
        config_of(samples_per_prompt=3, majority=same),
        {"": prompts_of("x", 3)},
        rollout=Told(table=torch.zeros(VOCAB, VOCAB), version=0),
        reward=FakeReward(has_b),
    )
    assert evaluation.reports[0].values["majority"].tolist() == pytest.approx(majorities)
    assert values(evaluation.metrics)["val/reward/majority"] == pytest.approx(np.mean(majorities))


def test_a_majority_of_what_no_reward_tells_is_refused() -> None:
    config = config_of(majority=SameAnswer.extracted)
    with pytest.raises(DataError, match=r"majority=extracted: the reward of x does not say .*use .*=response"):
        ask(config, {"": prompts_of("x", 2)}, lambda sample: Reward(score=1.0))


def test_a_failed_reward_that_gives_a_score_has_no_vote() -> None:
    def fails_on_b(sample: Sample) -> Reward:
        if "b" in sample.response.casefold():
            return Reward(score=-1.0, failure=FailureKind.raised)  # what reward.on_failure=score makes of it
        return Reward(score=0.5, extracted=sample.response)

    evaluation = evaluate(
        config_of(samples_per_prompt=3, majority=SameAnswer.extracted),
        {"": prompts_of("x", 3)},
        rollout=Told(table=torch.zeros(VOCAB, VOCAB), version=0),
        reward=FakeReward(fails_on_b),
    )
    assert evaluation.reports[0].values["majority"].tolist() == [0.5, 0.5, 0.5]


def test_sets_and_sources_are_told_apart_and_do_not_change_each_other() -> None:
    easy, mixed = prompts_of("x", 5), prompts_of("y", 4) + prompts_of("z", 3)
    config = config_of(pass_at=[2])
    both, _ = ask(config, {"easy": easy, "mixed": mixed}, last_token)
    numbers = values(both.metrics)
    assert not undocumented(both.metrics)
    assert [name for name in numbers if name.endswith("/reward/mean")] == [
        "val/easy/reward/mean",
        "val/mixed/reward/mean",
        "val/mixed/source/y/reward/mean",
        "val/mixed/source/z/reward/mean",
    ]
    y, z = (numbers[f"val/mixed/source/{source}/reward/mean"] for source in "yz")
    assert numbers["val/mixed/reward/mean"] == pytest.approx((4 * y + 3 * z) / 7)
    longer, _ = ask(config, {"easy": easy * 3, "mixed": mixed}, last_token)
    for name, value in numbers.items():
        if name.startswith("val/mixed/"):
            assert values(longer.metrics)[name] == value, name


@pytest.mark.parametrize("sets", [{"": 20}, {"easy": 20}])
def test_failed_rewards_are_counted_and_left_out(sets: dict[str, int]) -> None:
    def fails_on_ends(sample: Sample) -> Reward:
        if sample.response.endswith("0"):
            return Reward(score=math.nan, failure=FailureKind.raised)
        return last_token(sample)

    config = config_of(pass_at=[4])
    (name, rows) = next(iter(sets.items()))
    whole, _ = ask(config, {name: prompts_of("x", rows)}, last_token)
    evaluation, _ = ask(config, {name: prompts_of("x", rows)}, fails_on_ends)
    by_prompt = [
        [answer.reward.score for answer in prompt.answers if answer.reward.extracted != "0"]
        for prompt in whole.answered[0].prompts
    ]
    report = evaluation.reports[0]
    assert report.whole.failed == sum(4 - len(left) for left in by_prompt) > 0
    means = [np.mean(left) for left in by_prompt if left]
    assert report.whole.statistics["mean"].prompts == len(means)
    assert report.whole.statistics["mean"].value == pytest.approx(np.mean(means))
    complete = [max(left) for left in by_prompt if len(left) == 4]
    assert 0 < report.whole.statistics["pass_at_4"].prompts == len(complete) < rows
    assert report.whole.statistics["pass_at_4"].value == pytest.approx(np.mean(complete))
    assert len(report.whole.response_tokens) == sum(map(len, by_prompt))

    nothing, _ = ask(config, {name: prompts_of("x", 2)}, lambda _: Reward(score=math.nan, failure=FailureKind.died))
    left = {metric for metric, value in values(nothing.metrics).items() if not metric.startswith("timing/")}
    assert left == {f"val/{name + '/' if name else ''}failed_rewards"}


def test_progress_is_told_to_the_last_answer() -> None:
    told: list[tuple[int, int]] = []
    rollout = FakeRollout(table=torch.zeros(VOCAB, VOCAB), version=0)
    sets = {"a": prompts_of("x", 3), "b": prompts_of("y", 2)}
    evaluate(
        config_of(), sets, rollout=rollout, reward=FakeReward(last_token), on_answered=lambda *now: told.append(now)
    )
    assert told == [(done, 20) for done in (4, 8, 12, 16, 20)]


def training_lines(run: Started) -> list[dict[str, object]]:
    """metrics.jsonl without validation and time."""
    lines = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("val/", *MEASURED)
    return [
        {name: value for name, value in line.items() if not name.startswith(left_out)}
        for line in lines
        if line["step"] > 0
    ]


def sampled(config: RunConfig) -> RunConfig:
    """Validate by drawn answers, several to a prompt."""
    config.rollout.validation = replace(config.rollout.sampling)
    config.validation = ValidationConfig(samples_per_prompt=3, pass_at=[1, 3], majority=SameAnswer.response)
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_bitwise_the_same_with_and_without_validation(name: str, tmp_path: Path) -> None:
    def run(folder: str, test_freq: int, before: bool) -> Started:
        config = sampled(CONFIGS[name]())
        config.trainer.test_freq, config.trainer.val_before_train = test_freq, before
        started = start(config, tmp_path / folder)
        assert started.finish()
        return started

    without, every = run("without", -1, False), run("every", 1, True)
    assert training_lines(every) == training_lines(without)
    assert all("val/reward/pass_at_3" in line for line in every.lines())
    assert not any(name.startswith("val/") for line in without.lines() for name in line)
    assert every.answers() == without.answers()
    for mine, theirs in zip(every.tables(), without.tables(), strict=True):
        assert torch.equal(mine, theirs)
    assert every.controller.parts.step_sampler.state() == without.controller.parts.step_sampler.state()


@pytest.mark.parametrize("name", ["over-sampling", "one step off, partial"])
def test_a_run_that_validates_resumes_as_one_that_does_not(name: str, tmp_path: Path) -> None:
    """Killed in a validation between two checkpoints, by a run that then goes on with other validations."""
    config = sampled(CONFIGS[name]())
    config.trainer.test_freq, config.trainer.val_before_train = -1, False
    whole = start(config, tmp_path / "whole")
    assert whole.finish()

    def killed(*_: object) -> None:
        raise Killed

    config = sampled(CONFIGS[name]())
    config.trainer.test_freq = 1
    first = start(config, tmp_path / "run")
    tell = first.observer.on_validation
    first.observer.on_validation = lambda step, found: killed() if step == 5 else tell(step, found)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.finish()
    second = start(resuming(config), tmp_path / "run")
    assert second.finish()
    assert training_lines(second) == training_lines(whole)
    for mine, theirs in zip(second.tables(), whole.tables(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_best_checkpoint_by_a_metric_of_one_set_is_kept(tmp_path: Path) -> None:
    config = sampled(CONFIGS["critic and adaptive KL"]())
    config.data.validation_sets = {"easy": SourceConfig(), "hard": SourceConfig()}
    config.trainer.save_freq = config.trainer.test_freq = 1
    config.checkpoint.keep_last, config.checkpoint.keep_best = 1, "val/hard/reward/pass_at_3"
    config.validation.correct_from = 0.5
    run = start(config, tmp_path / "run", validation={"easy": PROMPTS[:2], "hard": PROMPTS[2:]})
    assert run.finish()
    measured = {line["step"]: line["val/hard/reward/pass_at_3"] for line in run.lines() if line["step"] > 0}
    assert len(set(measured.values())) > 2
    best = max(measured, key=lambda step: (measured[step], step))
    kept = {int(path.name.removeprefix("step_")) for path in (run.folder / "checkpoints").glob("step_*")}
    assert kept == {best, max(measured)}
    summary = run.observer.finish("completed")
    assert summary["val_reward_last"] == {name: run.lines()[-1][f"val/{name}/reward/mean"] for name in ("easy", "hard")}


def test_every_answer_is_written_with_its_score(tmp_path: Path) -> None:
    run = start(sampled(CONFIGS["greedy answers"]()), tmp_path / "run")
    assert run.finish()
    assert [path.name for path in sorted((run.folder / "generations").iterdir())] == [
        f"step_{step:06d}.jsonl" for step in (0, 3, 6)
    ]
    lines = [json.loads(text) for text in (run.folder / "generations" / "step_000006.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [row for row in range(3) for _ in range(3)]
    assert np.mean([line["score"] for line in lines]) == pytest.approx(run.lines()[-1]["val/reward/mean"])
    assert all(line["response"].split() and line["prompt"] == str(line["row"]) for line in lines)
