"""Rules about rewards, and how sections with several are written on the command line."""

from pathlib import Path
from typing import Any

import pytest

from megappo.cli.rewards import rewards_can_be_made, settle_rewards
from megappo.config.algorithm import OverlongConfig
from megappo.config.data import SourceConfig
from megappo.config.reward import FailedReward, RewardTerm, RewardTerms, terms_of
from megappo.config.reward_rules import model_rewards, reward_sections
from megappo.config.rules import check_config
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.errors import ConfigError, Violation


def faults(config: RunConfig) -> dict[str, str]:
    return {violation.key: str(violation) for violation in check_config(config)}


def test_a_run_without_terms_has_one_reward() -> None:
    section = RewardTerms(name="math_verify", params={"timeout_s": 1})
    assert terms_of(section) == {"": RewardTerm(name="math_verify", params={"timeout_s": 1})}


def test_sections_of_sources_are_under_the_keys_of_their_sources(config: RunConfig) -> None:
    assert reward_sections(config) == {"": config.reward}
    own = RewardTerms(name="numeric")
    assert config.data.validation is not None
    config.data.train.reward, config.data.validation.reward = own, own
    assert list(reward_sections(config)) == ["", "data.train", "data.validation"]
    # `train` is not read beside `train_sources`.
    config.data.train_sources = {"math": SourceConfig(kind="jsonl", reward=own), "code": SourceConfig(kind="jsonl")}
    assert list(reward_sections(config)) == ["", "data.train_sources.math", "data.validation"]


@pytest.mark.parametrize(
    ("terms", "key", "text"),
    [
        ({"a": RewardTerm(name="exact_mach")}, "reward.terms.a.name", "did you mean exact_match?"),
        ({"a": RewardTerm(weight=float("nan"))}, "reward.terms[a].weight", "is not a number"),
        ({"a": RewardTerm(weight=float("inf"))}, "reward.terms[a].weight", "must be finite"),
        ({"a": RewardTerm(weight=0.0), "b": RewardTerm(weight=0.0)}, "reward.terms", "{a, b} all have weight 0"),
        ({"failed": RewardTerm()}, "reward.terms", "is taken by the metric reward/failed"),
        ({"a/b": RewardTerm()}, "reward.terms", "cannot be part of a metric's name"),
        ({"a": RewardTerm(name="model")}, "reward.terms.a.model_path", "must be given for the reward `model`"),
    ],
)
def test_wrong_terms_are_refused(config: RunConfig, terms: dict[str, RewardTerm], key: str, text: str) -> None:
    config.reward.terms = terms
    assert text in faults(config)[key]


@pytest.mark.parametrize(
    ("values", "key", "text"),
    [
        ({"concurrency": 0}, "reward.concurrency", "must be positive"),
        ({"timeout_s": 0.0}, "reward.timeout_s", "must be positive"),
        ({"timeout_s": float("nan")}, "reward.timeout_s", "is not a number"),
        ({"retries": -1}, "reward.retries", "must not be negative"),
        ({"workers": 0}, "reward.workers", "must be positive"),
        ({"failed_score": -1.0}, "reward.failed_score", "is not read with reward.on_failure=stop"),
        (
            {"failed_score": float("nan"), "on_failure": FailedReward.score},
            "reward.failed_score",
            "is not a number",
        ),
    ],
)
def test_wrong_limits_are_refused(config: RunConfig, values: dict[str, Any], key: str, text: str) -> None:
    for name, value in values.items():
        setattr(config.reward, name, value)
    assert text in faults(config)[key]


@pytest.mark.parametrize("estimator", ["gdpo", "maxrl"])
def test_a_score_for_failed_rewards_fits_the_estimator(config: RunConfig, estimator: str) -> None:
    config.algorithm.advantage.name, config.algorithm.advantage.reward_keys = estimator, ["correct"]
    config.reward.on_failure, config.reward.failed_score = FailedReward.score, -1.0
    key = "reward.on_failure" if estimator == "gdpo" else "reward.failed_score"
    assert estimator in faults(config)[key]
    config.reward.on_failure, config.reward.failed_score = FailedReward.drop, 0.0
    assert key not in faults(config)


def test_what_terms_replace_is_refused_beside_them(config: RunConfig) -> None:
    config.reward.name, config.reward.params = "reasoning_gym", {"task": "spell_backward"}
    config.reward.terms = {"a": RewardTerm()}
    found = faults(config)
    assert "is not read beside reward.terms" in found["reward.name"]
    assert found["reward.params"].endswith("take it out with reward.params={})")


def test_every_source_is_checked(config: RunConfig) -> None:
    config.data.train.reward = RewardTerms(name="exact_mach", terms={})
    assert "data.train.reward.name" in faults(config)
    config.data.train.reward = RewardTerms(name="exact_match", params={"nonsense": 1})
    (found,) = rewards_can_be_made(config)
    assert found.key == "data.train.reward.name" and "params.nonsense is unknown" in found.rule
    config.data.train.reward, config.reward.timeout_s = RewardTerms(name="code"), 30.0
    (found,) = rewards_can_be_made(config)
    assert found.key == "data.train.reward.params.total_s" and "reward.timeout_s=30 must be longer" in found.rule


def test_a_penalty_for_long_answers_begins_below_the_longest_one(config: RunConfig) -> None:
    config.reward.terms = {
        "right": RewardTerm(),
        "long": RewardTerm(name="overlong", params={"max_tokens": 12, "buffer_tokens": 4}),
        "short": RewardTerm(name="length", params={"target_tokens": 8, "scale_tokens": 2}),
        "exactly": RewardTerm(name="length", params={"target_tokens": 9, "scale_tokens": 2, "both_sides": True}),
        "wrong": RewardTerm(name="overlong", params={"max_tokens": "12"}),  # told of where it is made
    }
    config.algorithm.overlong = OverlongConfig(max_length=10, buffer=2)
    assert [str(violation) for violation in check_config(config)] == [
        "reward.terms.long.params.max_tokens=12 with buffer_tokens=4 is a penalty on answers of more than 8 tokens, "
        "and rollout.sampling.max_new_tokens=8 lets none be longer: it is always 0 "
        "(lower it, or raise rollout.sampling.max_new_tokens)",
        "reward.terms.short.params.target_tokens=8 is a penalty on answers of more than 8 tokens, "
        "and rollout.sampling.max_new_tokens=8 lets none be longer: it is always 0 "
        "(lower it, or raise rollout.sampling.max_new_tokens)",
        "algorithm.overlong.max_length=10 with buffer=2 is a penalty on answers of more than 8 tokens, "
        "and rollout.sampling.max_new_tokens=8 lets none be longer: it is always 0 "
        "(lower it, or raise rollout.sampling.max_new_tokens)",
    ]
    config.rollout.sampling.max_new_tokens = config.rollout.validation.max_new_tokens = 9
    assert check_config(config) == []
    # What only a validation set is scored by goes by the answers of the validation.
    assert config.data.validation is not None
    config.data.validation.reward = RewardTerms(name="length", params={"target_tokens": 9, "scale_tokens": 1})
    (found,) = check_config(config)
    assert found.key == "data.validation.reward.params.target_tokens"
    assert "rollout.validation.max_new_tokens=9" in found.rule


def test_reward_models_of_terms_and_sources_get_absolute_paths(config: RunConfig) -> None:
    config.reward.terms = {"judge": RewardTerm(name="model", model_path="judge")}
    config.data.train.reward = RewardTerms(name="model", model_path="other")
    settled = settle_rewards(config)
    assert {key: term.model_path for key, term in model_rewards(settled).items()} == {
        "reward.terms.judge": str(Path("judge").resolve()),
        "data.train.reward": str(Path("other").resolve()),
    }


def test_terms_can_be_written_at_once_or_key_by_key() -> None:
    at_once = "reward.terms={right: {name: math_verify, weight: 2}, short: {name: length, params: {target_tokens: 9}}}"
    by_key = [
        "reward.terms.right.name=math_verify",
        "reward.terms.right.weight=2",
        "reward.terms.short.name=length",
        "reward.terms.short.params.target_tokens=9",
    ]
    expected = {
        "right": RewardTerm(name="math_verify", weight=2.0),
        "short": RewardTerm(name="length", params={"target_tokens": 9}),
    }
    for overrides in ([at_once], by_key, ["reward.terms.gone.weight=3", at_once]):
        assert load_run_config(overrides, rules=()).reward.terms == expected
    nested = load_run_config(["data.train_sources={m: {kind: jsonl, reward: {terms: {a: {weight: 2}}}}}"], rules=())
    assert nested.data.train_sources["m"].reward == RewardTerms(terms={"a": RewardTerm(weight=2.0)})


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("reward.terms={x: {nme: math_verify}}", "Key 'nme' not in 'RewardTerm'"),
        ("reward.terms={x: {weight: heavy}}", "Value 'heavy' of type 'str' could not be converted to Float"),
        ("reward.terms={x: 3}", "must be a map such as {name: {name: value, ...}}"),
        ("reward.terms={x: null}", "is not Optional"),
        ("reward.terms=[x]", "must be a map"),
        ("reward.terms.x.nme=math_verify", "did you mean reward.terms.x.name?"),
    ],
)
def test_wrong_terms_are_told_and_leave_the_others_alone(override: str, text: str) -> None:
    seen: list[RunConfig] = []

    def see(config: RunConfig) -> list[Violation]:
        seen.append(config)
        return []

    with pytest.raises(ConfigError) as caught:
        load_run_config(
            ["experiment=quickstart", "reward.terms.kept.weight=3", override, "trainer.total_steps=x"], rules=(see,)
        )
    assert seen[0].reward.terms == {"kept": RewardTerm(weight=3.0)}
    assert text in str(caught.value.violations[0])
    assert [violation.key for violation in caught.value.violations][1] == "trainer.total_steps"
