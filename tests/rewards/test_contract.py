"""What every registered reward must do. A new entry of the registry needs an example here."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megappo.config.data import RewardConfig
from megappo.data.tokenizer import character_tokenizer
from megappo.errors import DataError, MegappoError
from megappo.registry import RegistryError
from megappo.rewards import REWARDS, RewardFunction, Sample, make_reward
from tests.rewards.tiny_reward_model import make_last_character_model

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789> "
ANY_TEXT = ["", " ", "\n", "\u00e9\u3042\U0001f600", "\x00", "((((", "$\\frac{$", "1e999", "None", "9" * 40]
ENTRY = {"question": "Spell this word backward (example: sun -> nus): top", "answer": "pot", "metadata": {}}


@dataclass(kw_only=True, frozen=True)
class Example:
    """A working reward, a row, a response that scores high and one that scores low."""

    config: RewardConfig
    row: Sample
    good: str
    bad: str
    wrong_params: list[dict[str, Any]] = field(default_factory=list)


def examples(model_path: Path) -> dict[str, Example]:
    row = Sample(prompt="top>", response="", answer="pot", source="words", extra={"entry": ENTRY})
    return {
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
            config=RewardConfig(name="model", model_path=str(model_path)),
            row=row,
            good="pot",
            bad="pox",
            wrong_params=[{"batch_size": 0}, {"path": "elsewhere"}, {"device": "no-such-device"}],
        ),
    }


@pytest.fixture(scope="module")
def make_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Example]:
    folder = tmp_path_factory.mktemp("reward-model")
    model = make_last_character_model(folder / "model", character_tokenizer(CHARACTERS), {"t": 1.5, "x": -0.5})
    return lambda name: examples(model)[name]


def scores(reward: RewardFunction, samples: list[Sample]) -> list[float]:
    return [result.score for result in reward.score(samples)]


@pytest.mark.parametrize("name", REWARDS.names())
def test_scores_come_in_the_order_of_the_samples(name, make_example):
    example = make_example(name)
    reward = make_reward(example.config)
    good, bad = (replace(example.row, response=text) for text in (example.good, example.bad))
    found = scores(reward, [bad, good, good, bad])
    assert len(found) == 4
    assert found[1] == found[2] > found[0] == found[3]


@pytest.mark.parametrize("name", REWARDS.names())
def test_scores_do_not_depend_on_the_batch_and_repeat(name, make_example):
    example = make_example(name)
    reward = make_reward(example.config)
    samples = [replace(example.row, response=text) for text in (example.good, example.bad, "", example.good * 3)]
    together = scores(reward, samples)
    assert together == scores(reward, samples)
    # A model adds up in another order when rows are padded: fp32 rounding.
    assert [scores(reward, [sample])[0] for sample in samples] == pytest.approx(together, abs=1e-5)


@pytest.mark.parametrize("name", REWARDS.names())
@pytest.mark.parametrize(
    "text", ["", " ", "\n", "\u00e9\u3042\U0001f600", "\x00", "((((", "$\\frac{$", "1e999", "None", "9" * 40]
)
def test_any_response_gets_a_finite_score(name, make_example, text):
    example = make_example(name)
    (result,) = make_reward(example.config).score([replace(example.row, response=text)])
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
    good = replace(example.row, response=example.good)
    cut = replace(good, finish_reason=finish_reason)
    free = make_reward(example.config)
    strict = make_reward(replace(example.config, params=example.config.params | {"require_stop": True}))
    assert scores(free, [good, cut])[0] == scores(free, [good, cut])[1]
    assert scores(strict, [cut, good]) == [0.0, scores(free, [good])[0]]


def test_an_unknown_reward_lists_the_known_ones():
    with pytest.raises(RegistryError, match="exact_match, math_verify, model, reasoning_gym"):
        make_reward(RewardConfig(name="bleu"))


OUTSIDE = """
from megappo.rewards import Reward

class Lengths:
    def __init__(self, config):
        self.scale = config.params["scale"]
    def score(self, samples):
        return [Reward(score=self.scale * len(sample.response)) for sample in samples]

class Faulty(Lengths):
    def score(self, samples):
        return super().score(samples)[1:]
"""


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "outside_rewards.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_reward_from_outside_gets_its_parameters(outside):
    reward = make_reward(RewardConfig(name="outside_rewards:Lengths", params={"scale": 2.0, "require_stop": True}))
    samples = [Sample(prompt="", response="abc", answer=None, finish_reason=reason) for reason in ("stop", "length")]
    assert scores(reward, samples) == [6.0, 0.0]


def test_a_wrong_number_of_rewards_is_an_error(outside):
    reward = make_reward(RewardConfig(name="outside_rewards:Faulty", params={"scale": 1.0}))
    with pytest.raises(DataError, match="1 rewards for 2 samples"):
        reward.score([Sample(prompt="", response="a", answer=None)] * 2)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error(outside, scale):
    reward = make_reward(RewardConfig(name="outside_rewards:Lengths", params={"scale": scale}))
    with pytest.raises(DataError, match="not finite"):
        reward.score([Sample(prompt="", response="a", answer=None)])


def test_required_stop_must_be_a_switch():
    with pytest.raises(DataError, match="require_stop='yes'"):
        make_reward(RewardConfig(params={"require_stop": "yes"}))
