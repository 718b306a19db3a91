"""`megappo evaluate`: what is refused before anything starts, what is written, and two evaluations compared."""

import io
import json
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megappo.checkpoint.names import step_name
from megappo.cli.evaluate import _load, _now_at
from megappo.cli.evaluation_pairs import PROMPTS, compare, read_prompts, require_shared, write_prompts
from megappo.cli.evaluation_report import facts_of, line_of, print_differences, print_tables, write_generations
from megappo.cli.evaluation_settings import (
    Tree,
    incomparable,
    read_settings,
    require_same_rewards,
    setting_differences,
    settings_of,
)
from megappo.cli.main import main
from megappo.cli.run_data import _check_best_metric
from megappo.config.data import DataConfig, SourceConfig
from megappo.config.reward import RewardConfig
from megappo.config.rollout import RolloutConfig, SamplingConfig
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.config.validation import ValidationConfig
from megappo.controller.evaluate import Evaluation
from megappo.controller.judge import Answer, AnsweredPrompt, AnsweredSet, judge
from megappo.controller.ports import SequenceInfo
from megappo.data.types import Prompt
from megappo.errors import ConfigError, DataError
from megappo.models.description import MODEL_FILE
from megappo.observability.console import RunConsole
from megappo.observability.run_directory import RunDirectory
from megappo.rewards.types import FailureKind, Reward, Sample


def config_of(**validation: Any) -> RunConfig:
    sampling = SamplingConfig(temperature=0.5)
    return RunConfig(rollout=RolloutConfig(validation=sampling), validation=ValidationConfig(**validation))


def evaluation_of(scores: dict[str, list[list[float]]], config: RunConfig, name: str = "") -> Evaluation:
    """Return an evaluation with given scores: source -> prompts -> answers; NaN for a reward that failed."""
    prompts: list[AnsweredPrompt] = []
    number = 0
    for source, rows in scores.items():
        for row, given in enumerate(rows):
            answers = []
            for score in given:
                info = SequenceInfo(
                    sequence_id=number,
                    group_id=row,
                    prompt_tokens=3,
                    response_tokens=4,
                    finish_reason="length" if score == 0 else "stop",
                    policy_version=0,
                    row=row,
                )
                failure = FailureKind.raised if np.isnan(score) else None
                sample = Sample(prompt=f"{source} {row}", response=f"answer {number}", answer=None)
                answers.append(Answer(info=info, reward=Reward(score=score, failure=failure), sample=sample))
                number += 1
            scored = [answer for answer in answers if answer.reward.failure is None]
            failed = [answer for answer in answers if answer.reward.failure is not None]
            prompt = Prompt(row=row, text=f"{source} {row}", tokens=[1], answer="a", source=source)
            prompts.append(AnsweredPrompt(prompt=prompt, answers=scored, failed=failed))
    answered = AnsweredSet(name=name, prompts=prompts)
    return Evaluation(answered=[answered], reports=[judge(answered, config)], metrics={})


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
NAN = float("nan")
SCORES = {"x": [[1.0, 0.0], [0.0, 0.0]], "y": [[1.0, NAN]]}


def printed(evaluation: Evaluation, config: RunConfig) -> str:
    output = io.StringIO()
    with RunConsole(file=output, terminal=False) as console:
        print_tables(console, evaluation.reports, config.validation)
    return output.getvalue()


def test_tables_show_each_source_and_all_of_them() -> None:
    config = config_of(samples_per_prompt=2, pass_at=[2], bootstrap_samples=0)
    rows = [
        [cell.strip() for cell in line[1:-1].split("│")]
        for line in printed(evaluation_of(SCORES, config), config).splitlines()
        if line.startswith("│")
    ]
    assert ["x", "mean@2", "0.250", "", "2 prompts"] in rows
    assert ["all", "mean@2", "0.500", "", "3 prompts"] in rows
    # The second answer to the prompt of y has no score: that prompt has no pass@2.
    assert [row[1:] for row in rows if row[1] == "pass@2"] == [
        ["pass@2", "0.500", "", "2 prompts"],
        ["pass@2", "-", "", "0 prompts"],
        ["pass@2", "0.500", "", "2 prompts"],
    ]
    assert [row[1:] for row in rows][-2:] == [
        ["truncated", "60.0%", "", "5 answers"],
        ["failed rewards", "1", "", "6 answers"],
    ]


def test_a_line_shows_the_interval_and_failures() -> None:
    config = config_of(samples_per_prompt=2)
    assert line_of(evaluation_of({"x": [[1.0, 1.0]]}, config).reports[0], config.validation) == (
        "mean@2 1.000 (1.000 to 1.000), best@2 1.000 (1.000 to 1.000)"
    )
    line = line_of(evaluation_of({"x": [[NAN, NAN]]}, config, "hard").reports[0], config.validation)
    assert line == "hard: mean@2 -, best@2 -, 2 rewards failed"


def test_the_facts_are_json_whatever_failed() -> None:
    config = config_of(samples_per_prompt=2)
    facts = json.loads(json.dumps(facts_of(evaluation_of({"x": [[NAN, NAN]]}, config).reports), allow_nan=False))
    assert facts["validation"] | {"reward": {}, "response_tokens": None} == facts["validation"]
    found = facts_of(evaluation_of(SCORES, config).reports)["validation"]
    assert (found["prompts"], found["answers"], found["failed_rewards"]) == (3, 5, 1)
    assert found["sources"]["y"]["reward"]["mean"]["value"] == 1.0


def test_generations_hold_failed_answers_without_a_score(tmp_path: Path) -> None:
    write_generations(
        tmp_path / "a" / "generations.jsonl", evaluation_of(SCORES, config_of(samples_per_prompt=2)).answered
    )
    lines = [json.loads(text) for text in (tmp_path / "a" / "generations.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [1.0, 0.0, 0.0, 0.0, 1.0, None]
    assert [line["response"] for line in lines] == [f"answer {number}" for number in range(6)]
    assert lines[-1]["failure"] == "raised"


def test_two_evaluations_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    config = config_of(samples_per_prompt=2, pass_at=[1])
    base = random.random((200, 2))
    other = evaluation_of({"x": base.tolist()}, config)
    # Each prompt is 0.05 better, give or take a little; two prompts are only in one of them.
    better = np.vstack([base + 0.05 + 0.02 * random.standard_normal((200, 1)), [[0.5, 0.5]] * 2])
    mine = evaluation_of({"x": better.tolist()}, config)
    for name, evaluation in (("mine", mine), ("other", other)):
        (tmp_path / name).mkdir()
        write_prompts(tmp_path / name / PROMPTS, evaluation, samples_per_prompt=2)
    lines = {name: read_prompts(tmp_path / name) for name in ("mine", "other")}
    found = {one.statistic: one for one in compare(lines["mine"], lines["other"], config)}
    assert list(found) == ["mean", "best", "pass_at_1"]
    assert found["mean"].prompts == 200
    assert found["mean"].value == pytest.approx((better[:200] - base).mean())
    low, high = found["mean"].interval or (0.0, 0.0)
    assert 0.04 < low < found["mean"].value < high < 0.06
    # Two intervals side by side overlap: prompts differ by far more than the models do.
    apart = [evaluation.reports[0].whole.statistics["mean"].interval or (0.0, 0.0) for evaluation in (mine, other)]
    assert apart[0][0] < apart[1][1]
    output = io.StringIO()
    with RunConsole(file=output, terminal=False) as console:
        print_differences(console, list(found.values()), config.validation, title="Minus other")
    assert f"{found['mean'].value:+.3f}" in output.getvalue()


def test_what_grows_with_the_number_of_answers_is_not_compared(tmp_path: Path) -> None:
    two, three = config_of(samples_per_prompt=2, pass_at=[2]), config_of(samples_per_prompt=3, pass_at=[2])
    write_prompts(tmp_path / PROMPTS, evaluation_of({"x": [[1.0, 0.0]]}, two), samples_per_prompt=2)
    first = read_prompts(tmp_path)
    write_prompts(tmp_path / PROMPTS, evaluation_of({"x": [[1.0, 0.0, 0.0]]}, three), samples_per_prompt=3)
    found = {one.statistic: one.value for one in compare(read_prompts(tmp_path), first, three)}
    assert found == {"mean": pytest.approx(1 / 3 - 1 / 2), "pass_at_2": pytest.approx(2 / 3 - 1)}


def test_evaluations_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    for read, file in ((read_prompts, "prompts.jsonl"), (read_settings, "config.yaml")):
        with pytest.raises(DataError, match=rf"is no evaluation: .*{file}.* \(give the --output"):
            read(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(DataError, match=r"is no evaluation: config\.yaml holds no configuration"):
        read_settings(tmp_path)
    config = config_of()
    write_prompts(tmp_path / PROMPTS, evaluation_of({"x": [[1.0]]}, config), samples_per_prompt=1)
    prompts = {source: Prompt(row=0, text="x 0", tokens=[1], answer="a", source=source) for source in "xy"}
    require_shared({"": [prompts["y"], prompts["x"]]}, read_prompts(tmp_path))
    with pytest.raises(DataError, match="no prompt in common"):
        require_shared({"": [prompts["y"]], "hard": [prompts["x"]]}, read_prompts(tmp_path))
    for text in ('{"prompt": "x", "answer": "y"}\n', "[]\n"):
        (tmp_path / PROMPTS).write_text(text)
        with pytest.raises(DataError, match=r"is no evaluation: line 1 of .*prompts\.jsonl is not that of a prompt"):
            read_prompts(tmp_path)


@cache
def _default_yaml() -> str:
    data = DataConfig(validation=SourceConfig(kind="reasoning_gym", task="gcd"))
    return resolved_yaml(RunConfig(data=data, reward=RewardConfig(name="reasoning_gym", params={"binary": True})))


def settings(**changes: Any) -> Tree:
    """The configuration of an evaluation, as its folder holds it. `a__b` is the key a.b."""
    tree: Any = settings_of(_default_yaml())
    for key, value in changes.items():
        *sections, last = key.split("__")
        reduce(getitem, sections, tree)[last] = value
    return tree


MODEL = {"name": "reward_model", "params": {}, "model_path": None, "terms": {}}


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        (
            {"reward__params": {"binary": False}},
            {},
            "reward.params.binary=False is another reward than that of old, True: scores cannot be compared",
        ),
        (
            {"reward__name": "numeric"},
            {},
            "reward.name=numeric is another reward than that of old, reasoning_gym",
        ),
        (
            {"reward__terms": {"x": {"name": "numeric"}}},
            {},
            "reward.terms.x.name=numeric is another reward than that of old, null",
        ),
        (
            {"data__validation__reward": {"name": "numeric", "params": {"binary": True}}},
            {},
            "data.validation.reward.name=numeric is another reward than that of old, reasoning_gym",
        ),
        (
            {"reward": MODEL, "reward_model__path": "a"},
            {"reward": MODEL, "reward_model__path": "b"},
            "reward.reward_model.model_path=",
        ),
    ],
)
def test_scores_of_other_rewards_are_not_compared(here: Any, there: Any, message: str) -> None:
    require_same_rewards(settings(**here), settings(**here), folder=Path("old"))
    with pytest.raises(ConfigError) as caught:
        require_same_rewards(settings(**here), settings(**there), folder=Path("old"))
    assert message in str(caught.value)


def test_a_set_that_only_one_has_may_have_any_reward_and_so_may_training() -> None:
    numeric = {"name": "numeric", "params": {}}
    one = {"data__validation": None, "data__validation_sets": {"a": {"path": "a"}}}
    other = {"data__validation": None, "data__validation_sets": {"a": {"path": "a"}, "b": {"reward": numeric}}}
    require_same_rewards(
        settings(**other, data__train__reward=numeric), settings(**one, reward__timeout_s=9), folder=Path("old")
    )
    plain = other | {"data__validation_sets": {"a": {"path": "a"}, "b": {"reward": None}}}
    with pytest.raises(ConfigError, match=r"^config error: data.validation_sets.b.reward.name=numeric .*\n.*params"):
        require_same_rewards(settings(**other), settings(**plain), folder=Path("old"))
    # The same folder of a model, written in two ways.
    models = [{"name": "model", "model_path": str(path)} for path in ("judge", Path("judge").resolve())]
    require_same_rewards(settings(reward=models[0]), settings(reward=models[1]), folder=Path("old"))


def test_other_settings_are_told_of_and_what_means_something_else_is_left_out(tmp_path: Path) -> None:
    changed = settings(rollout__validation__temperature=0.5, validation__correct_from=0.5, seed=3)
    found = setting_differences(changed, settings())
    assert [str(one) for one in found] == [
        "rollout.validation.temperature=0.5 (there 0.0)",
        "validation.correct_from=0.5 (there 1.0)",
    ]
    assert incomparable(found) == ("pass_at_",)
    config = config_of(samples_per_prompt=2, pass_at=[1])
    write_prompts(tmp_path / PROMPTS, evaluation_of(SCORES, config), samples_per_prompt=2)
    lines = read_prompts(tmp_path)
    compared = compare(lines, lines, config, left_out=incomparable(found))
    assert [one.statistic for one in compared] == ["mean", "best"]


def test_an_earlier_evaluation_that_made_room_is_called_by_its_new_name(tmp_path: Path) -> None:
    old = tmp_path / "judged"
    moved = RunDirectory(path=old, moved_aside=tmp_path / "judged.1")
    (tmp_path / "link").symlink_to(old)
    places = {place: _now_at(tmp_path / place, moved) for place in ("judged", "link", "judged/inner", "other")}
    assert {name: str(place.relative_to(tmp_path)) for name, place in places.items()} == {
        "judged": "judged.1",
        "link": "judged.1",
        "judged/inner": "judged.1/inner",
        "other": "other",
    }
    assert _now_at(old, RunDirectory(path=old)) == old


def test_a_model_is_found_whatever_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = 'it\'s "a b", lr=1e-4 ${seed}'
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
    assert _load([name, "experiment=quickstart"]).model.path == name


@pytest.mark.parametrize("inside", ["", "/actor"])
def test_a_checkpoint_is_refused_with_the_command_that_makes_a_model_of_it(
    inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "runs" / "mine" / "checkpoints" / step_name(40)
    (step / "actor").mkdir(parents=True)
    (step / "actor" / MODEL_FILE).write_text("{}")
    assert main(["evaluate", f"{step}{inside}", "experiment=quickstart"]) == 2
    run = tmp_path / "runs" / "mine"
    assert capsys.readouterr().err == (
        f"config error: model={step}{inside} is no Hugging Face folder, which engines load "
        f"(make one with `megappo export --run {run} --step 40` and evaluate {run}/hf/step_000040)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "experiment=quickstart"], "(make one with `megappo export --run {run}` and evaluate"),
        (["a", "b", "experiment=quickstart"], "model=a, b are several"),
        (["{run}/nowhere", "experiment=quickstart"], "model.path={run}/nowhere is not a folder that exists"),
        (["{run}/lr=1", "experiment=quickstart"], "model.path={run}/lr=1 is not a folder that exists"),
        (["{run}/nowhere", "data.train.path=x"], "data.validation=null is what is evaluated"),
        (["experiment=quickstart", "--against", "{run}"], "{run} is no evaluation"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "runs/quickstart-sft/model").mkdir(parents=True)
    (tmp_path / "runs/quickstart-sft/model/config.json").write_text(json.dumps(LLAMA))
    assert main(["evaluate", *(argument.format(run=tmp_path) for argument in arguments)]) == 2
    assert message.format(run=tmp_path) in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart-sft"]


def test_the_best_checkpoint_is_not_that_of_a_source_without_prompts() -> None:
    config = RunConfig()
    prompts = {
        name: [Prompt(row=0, text="", tokens=[1], answer=None, source=source) for source in sources]
        for name, sources in {"": ["x", "y"], "hard": ["z"]}.items()
    }
    for best in ("val/source/x/reward/mean", "val/reward/mean", "reward/mean", None):
        config.checkpoint.keep_best = best
        _check_best_metric(config, prompts)
    config.checkpoint.keep_best = "val/source/gsm8k/reward/mean"
    with pytest.raises(ConfigError, match=r"is not measured: the prompts are of x, y \(name one of these sources\)"):
        _check_best_metric(config, prompts)
    config.checkpoint.keep_best = "val/hard/source/z/reward/mean"
    with pytest.raises(ConfigError, match=r"the prompts are of z alone \(use val/hard/reward/mean\)"):
        _check_best_metric(config, prompts)
