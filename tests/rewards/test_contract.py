"""What every registered reward must do. A new entry of the registry needs an example here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megappo.config.reward import RewardConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import DataError, MegappoError
from megappo.registry import RegistryError
from megappo.rewards import REWARDS, ComposedReward, Sample, make_reward
from megappo.rewards.types import ModelScore
from tests.rewards.scoring_service import scoring_service
from tests.rewards.tiny_reward_model import make_last_character_model

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789> "
ANY_TEXT = ["", " ", "\n", "\u00e9\u3042\U0001f600", "\x00", "((((", "$\\frac{$", "1e999", "None", "9" * 40]
ENTRY = {"question": "Spell this word backward (example: sun -> nus): top", "answer": "pot", "metadata": {}}


@dataclass(kw_only=True, frozen=True)
class Example:
    """A working reward, a row, a response that scores high and one that scores low.

    A response of n characters counts as n tokens."""

    config: RewardConfig
    row: Sample
    good: str
    bad: str
    wrong_params: list[dict[str, Any]] = field(default_factory=list)


ROW = Sample(prompt="top>", response="", answer="pot", source="words", extra={"entry": ENTRY})


def shipped_functions(url: str) -> dict[str, Example]:
    """The examples of rewards that need no model; `url` scores a response by its length."""
    cases = {"inputs": ["1", "2"], "outputs": ["2\n", "3\n"]}
    return {
        "multiple_choice": Example(
            config=RewardConfig(name="multiple_choice"),
            row=replace(ROW, answer="B"),
            good="The answer is (B).",
            bad="The answer is (A).",
            wrong_params=[{"letters": "AB CD"}, {"pattern": "answer"}],
        ),
        "numeric": Example(
            config=RewardConfig(name="numeric", params={"mode": "strict"}),
            row=replace(ROW, answer="1,000"),
            good="so it is\n#### 1000",
            bad="so it is\n#### 100",
            wrong_params=[{"mode": "loose"}, {"tolerance": -1}, {"percent": 1}],
        ),
        "format": Example(
            config=RewardConfig(name="format", params={"tags": ["think", "answer"]}),
            row=ROW,
            good="<think>a</think><answer>b</answer>",
            bad="<answer>b</answer>",
            wrong_params=[{}, {"tags": ["a"], "pattern": "b"}, {"pattern": "("}],
        ),
        "length": Example(
            config=RewardConfig(name="length", params={"target_tokens": 3, "scale_tokens": 4}),
            row=ROW,
            good="pot",
            bad="potpot",
            wrong_params=[{}, {"target_tokens": -1, "scale_tokens": 1}, {"target_tokens": 1, "scale_tokens": 0}],
        ),
        "overlong": Example(
            config=RewardConfig(name="overlong", params={"max_tokens": 8, "buffer_tokens": 4}),
            row=ROW,
            good="pot",
            bad="potpot",
            wrong_params=[{}, {"max_tokens": 4, "buffer_tokens": 5}, {"max_tokens": "8", "buffer_tokens": 4}],
        ),
        "repetition": Example(
            config=RewardConfig(name="repetition", params={"n": 2}),
            row=ROW,
            good="a b c d",
            bad="a b a b",
            wrong_params=[{"n": 0}, {"unit": "token"}, {"free_share": 1}],
        ),
        "code": Example(
            config=RewardConfig(name="code", params={"tests_key": "cases"}),
            row=replace(ROW, extra={"cases": cases}),
            good="```python\nprint(int(input()) + 1)\n```\n",
            bad="```python\nprint(2)\n```\n",
            wrong_params=[{"tests_key": 1}, {"time_s": 0}, {"time_s": 9, "total_s": 8}, {"memory_mb": 1}],
        ),
        "http": Example(
            config=RewardConfig(name="http", params={"url": url, "retries": 0}),
            row=ROW,
            good="potpot",
            bad="pot",
            wrong_params=[{}, {"url": "judge"}, {"url": url, "api_key_env": "NO_SUCH_KEY_IS_SET"}],
        ),
    }


def examples(model_path: Path, url: str) -> dict[str, Example]:
    row = ROW
    return shipped_functions(url) | {
        "exact_match": Example(
            config=RewardConfig(name="exact_match"), row=row, good="pot", bad="top", wrong_params=[{"strip": "yes"}]
        ),
        "reasoning_gym": Example(
            config=RewardConfig(name="reasoning_gym", params={"task": "spell_backward"}),
            row=row,
            good="pot",
            bad="xyz",
            wrong_params=[
                {},
                {"task": "no_such_task"},
                {"task": "spell_backward", "params": {"min_word": 1}},
                {"task": "spell_backward", "binary": "yes"},
            ],
        ),
        "math_verify": Example(
            config=RewardConfig(name="math_verify"),
            row=replace(row, answer="\\frac{1}{2}"),
            good="it is $0.5$",
            bad="it is $2$",
            wrong_params=[{"timeout_s": 0}, {"timeout_s": "5"}],
        ),
        "model": Example(
            config=RewardConfig(name="model", model_path=str(model_path), params={"end_token": False}),
            row=row,
            good="pot",
            bad="pox",
            wrong_params=[{"batch_size": 0}, {"path": "elsewhere"}, {"device": "no-such-device"}],
        ),
        "reward_model": Example(
            config=RewardConfig(name="reward_model"), row=row, good="tt", bad="x", wrong_params=[{"path": "elsewhere"}]
        ),
    }


def respond(example: Example, text: str) -> Sample:
    """A response, which a reward model has scored by its letters t."""
    score = ModelScore(score=float(text.count("t")))
    return replace(example.row, response=text, response_tokens=len(text), model_score=score)


@pytest.fixture(scope="module")
def make_example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Example]]:
    folder = tmp_path_factory.mktemp("reward-model")
    model = make_last_character_model(folder / "model", character_tokenizer(CHARACTERS), {"t": 1.5, "x": -0.5})
    with scoring_service() as service:
        yield lambda name: examples(model, service.url)[name]


def scores(reward: ComposedReward, samples: list[Sample]) -> list[float]:
    return [result.score for result in reward.score(samples)]


@pytest.mark.parametrize("name", REWARDS.names())
def test_scores_come_in_the_order_of_the_samples(name, make_example):
    example = make_example(name)
    reward = make_reward(example.config)
    good, bad = (respond(example, text) for text in (example.good, example.bad))
    found = scores(reward, [bad, good, good, bad])
    assert len(found) == 4
    assert found[1] == found[2] > found[0] == found[3]


@pytest.mark.parametrize("name", REWARDS.names())
def test_scores_do_not_depend_on_the_batch_and_repeat(name, make_example):
    example = make_example(name)
    reward = make_reward(example.config)
    samples = [respond(example, text) for text in (example.good, example.bad, "", example.good * 3)]
    together = scores(reward, samples)
    assert together == scores(reward, samples)
    # A model adds up in another order when rows are padded: fp32 rounding.
    assert [scores(reward, [sample])[0] for sample in samples] == pytest.approx(together, abs=1e-5)


@pytest.mark.parametrize("name", REWARDS.names())
@pytest.mark.parametrize("text", ANY_TEXT)
def test_any_response_gets_a_finite_score(name, make_example, text):
    example = make_example(name)
    (result,) = make_reward(example.config).score([respond(example, text)])
    assert -1e6 < result.score < 1e6


@pytest.mark.parametrize("name", REWARDS.names())
def test_no_samples_give_no_rewards(name, make_example):
    assert make_reward(make_example(name).config).score([]) == []


@pytest.mark.parametrize("name", REWARDS.names())
def test_unknown_and_wrong_parameters_are_refused(name, make_example):
    example = make_example(name)
    with pytest.raises(DataError, match=r"params\.nonsense is unknown"):
        make_reward(replace(example.config, params={"nonsense": 1}))
    for params in example.wrong_params:
        with pytest.raises(MegappoError):
            make_reward(replace(example.config, params=params))


@pytest.mark.parametrize("name", REWARDS.names())
@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_required_stops_score_0_for_responses_that_did_not_end(name, make_example, finish_reason):
    example = make_example(name)
    good = respond(example, example.good)
    cut = replace(good, finish_reason=finish_reason)
    free = make_reward(example.config)
    strict = make_reward(replace(example.config, params=example.config.params | {"require_stop": True}))
    assert scores(free, [good, cut])[0] == scores(free, [good, cut])[1]
    assert scores(strict, [cut, good]) == [0.0, scores(free, [good])[0]]


def test_an_unknown_reward_lists_the_known_ones():
    with pytest.raises(
        RegistryError, match="code, exact_match, format, http, length, math_verify, model, multiple_choice"
    ):
        make_reward(RewardConfig(name="bleu"))


def test_required_stop_must_be_a_switch():
    with pytest.raises(DataError, match="require_stop='yes'"):
        make_reward(RewardConfig(params={"require_stop": "yes"}))
