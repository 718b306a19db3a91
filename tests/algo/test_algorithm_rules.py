"""Every refusal of the algorithm section, with the key it names; presets and defaults pass."""

import math
from typing import Any

import pytest

from megappo.cli.algorithm_section import parse_algorithm
from megappo.config.algorithm import (
    AlgorithmConfig,
    CorrectionLevel,
    DynamicSamplingConfig,
    OldLogProbs,
    OnExhausted,
    OverlongConfig,
    RejectEstimator,
)
from megappo.config.algorithm_declarations import (
    ESTIMATOR_DECLARATIONS,
    LOSS_DECLARATIONS,
    reads_old_log_probs,
)
from megappo.config.algorithm_rules import algorithm_notes, algorithm_violations
from megappo.config.store import load_run_config
from megappo.errors import ConfigError
from tests.algo.plain_algorithm import DEFAULTS
from tests.algo.presets import PRESETS, preset_of


def test_the_defaults_break_no_rule() -> None:
    assert algorithm_violations(AlgorithmConfig(), samples_per_prompt=1) == []


@pytest.mark.parametrize(("limit", "buffer"), [(1024, 204), (3, 1)])
def test_dapo_penalises_the_last_fifth_of_the_response_limit(limit: int, buffer: int) -> None:
    settings = ["algorithm=dapo", f"rollout.sampling.max_new_tokens={limit}", "batching.samples_per_prompt=4"]
    composed = load_run_config([*settings, "model.path=m", "data.train.path=d"], rules=())
    assert composed.algorithm.overlong == OverlongConfig(max_length=limit, buffer=buffer, factor=1.0)
    without = load_run_config([*settings, "model.path=m", "data.train.path=d", "algorithm.overlong=null"], rules=())
    assert without.algorithm.overlong is None


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_break_no_rule(preset: str) -> None:
    assert algorithm_violations(preset_of(preset), samples_per_prompt=8) == []


def test_every_estimator_and_loss_has_a_preset() -> None:
    chosen = [preset_of(preset) for preset in PRESETS]
    assert {algorithm.advantage.name for algorithm in chosen} == set(ESTIMATOR_DECLARATIONS)
    assert {algorithm.policy_loss.name for algorithm in chosen} == set(LOSS_DECLARATIONS)


def test_every_section_may_be_written_out() -> None:
    assert parse_algorithm(DEFAULTS) == AlgorithmConfig()
    longer = parse_algorithm(
        {
            "correction": {
                "weight": {"level": "sequence", "mode": "mask", "low": 0.5, "high": 2.0},
                "reject": [{"level": "sequence_max", "estimator": "k3", "low": 0.0, "high": 1.0}],
            },
            "overlong": {"max_length": 4096, "buffer": 512, "factor": 1.0},
        }
    )
    assert longer.correction.weight is not None and longer.correction.weight.level is CorrectionLevel.sequence
    assert longer.correction.reject[0].estimator is RejectEstimator.k3
    assert longer.overlong == OverlongConfig()


GDPO = {"name": "gdpo", "reward_keys": ["a", "b"]}
WEIGHT = {"level": "token", "mode": "truncate"}

INFINITE: list[tuple[str, dict[str, Any]]] = [
    ("advantage.alpha", {"advantage": {"name": "gpg", "alpha": math.inf}}),
    ("policy_loss.tau_positive", {"policy_loss": {"name": "sapo", "tau_positive": math.inf}}),
    ("policy_loss.tau_negative", {"policy_loss": {"name": "sapo", "tau_negative": math.inf}}),
    ("policy_loss.selected_kl_coef", {"policy_loss": {"name": "kl_cov", "selected_kl_coef": math.inf}}),
    (
        "policy_loss.constant_length",
        {"policy_loss": {"aggregation": "token_sum_constant", "constant_length": math.inf}},
    ),
    ("kl.in_reward.coef", {"kl": {"in_reward": {"coef": math.inf}}}),
    ("kl.in_reward.target", {"kl": {"in_reward": {"coef": 0.1, "controller": "adaptive", "target": math.inf}}}),
    ("kl.in_loss.coef", {"kl": {"in_loss": {"coef": math.inf}}}),
    ("overlong.factor", {"overlong": {"factor": math.inf}}),
]
"""Numbers that take part in arithmetic; a bound may be infinite (no bound)."""

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("advantage.name", {"advantage": {"name": "grppo"}}, "is unknown"),
    ("policy_loss.name", {"policy_loss": {"name": "ppo"}}, "is unknown"),
    ("advantage.gamma", {"advantage": {"name": "grpo", "gamma": 0.9}}, "is not used by advantage.name=grpo"),
    ("advantage.lam", {"advantage": {"name": "reinforce_plus_plus", "lam": 0.9}}, "is not used"),
    ("advantage.alpha", {"advantage": {"name": "grpo", "alpha": 2.0}}, "is not used"),
    ("advantage.reward_keys", {"advantage": {"name": "grpo", "reward_keys": ["a"]}}, "is not used"),
    ("advantage.gamma", {"advantage": {"gamma": 1.5}}, "must be 0 or more and at most 1"),
    ("advantage.gamma", {"advantage": {"gamma": math.nan}}, "must be 0 or more"),
    ("advantage.alpha", {"advantage": {"name": "gpg", "alpha": 0.0}}, "must be above 0"),
    ("advantage.reward_keys", {"advantage": {"name": "gdpo"}}, "must name each reward part once"),
    ("advantage.reward_keys", {"advantage": {"name": "gdpo", "reward_keys": ["a", "a"]}}, "once"),
    ("advantage.weights", {"advantage": GDPO | {"weights": [1.0]}}, "one weight for each of 2"),
    ("advantage.weights", {"advantage": GDPO | {"weights": [1.0, math.inf]}}, "finite"),
    ("kl.in_reward.coef", {"advantage": GDPO, "kl": {"in_reward": {"coef": 0.1}}}, "does not reach the advantages"),
    ("overlong", {"advantage": GDPO, "overlong": {}}, "does not reach the advantages"),
    ("kl.in_reward.coef", {"advantage": {"name": "maxrl"}, "kl": {"in_reward": {"coef": 0.1}}}, "scores negative"),
    ("overlong", {"advantage": {"name": "maxrl"}, "overlong": {}}, "scores negative"),
    ("policy_loss.clip.low", {"policy_loss": {"clip": {"low": -0.1}}}, "must be 0 or more"),
    ("policy_loss.clip.high", {"policy_loss": {"clip": {"high": math.nan}}}, "must be 0 or more"),
    ("policy_loss.clip.dual", {"policy_loss": {"clip": {"dual": 1.0}}}, "must be above 1"),
    ("policy_loss.clip.dual", {"policy_loss": {"name": "gspo", "clip": {"dual": 3.0}}}, "is not used"),
    ("policy_loss.clip.high", {"policy_loss": {"name": "gpg", "clip": {"high": 0.3}}}, "is not used"),
    ("policy_loss.delta", {"policy_loss": {"delta": 0.3}}, "is not used by policy_loss.name=ppo_clip"),
    ("policy_loss.tau_negative", {"policy_loss": {"name": "sapo", "tau_negative": 0.0}}, "must be above 0"),
    ("policy_loss.delta", {"policy_loss": {"name": "dppo", "delta": -1.0}}, "must be above 0"),
    ("policy_loss.selected_fraction", {"policy_loss": {"name": "kl_cov", "selected_fraction": 2.0}}, "at most 1"),
    ("policy_loss.selected_kl_coef", {"policy_loss": {"name": "kl_cov", "selected_kl_coef": -1.0}}, "0 or more"),
    ("policy_loss.covariance_low", {"policy_loss": {"name": "clip_cov", "covariance_low": 9.0}}, "covariance_high"),
    ("policy_loss.constant_length", {"policy_loss": {"aggregation": "token_sum_constant"}}, "is needed by"),
    ("policy_loss.constant_length", {"policy_loss": {"constant_length": 10.0}}, "is not used"),
    (
        "policy_loss.constant_length",
        {"policy_loss": {"aggregation": "token_sum_constant", "constant_length": 0.0}},
        "must be above 0",
    ),
    *(
        ("policy_loss.aggregation", {"policy_loss": {"name": name, "aggregation": "token_mean"}}, "conflicts with")
        for name in ("gspo", "sapo", "gmpo")
    ),
    ("kl.in_reward.estimator", {"kl": {"in_reward": {"estimator": "k4"}}}, "is unknown"),
    ("kl.in_loss.estimator", {"kl": {"in_loss": {"estimator": "kl", "coef": 0.1}}}, "is unknown"),
    ("kl.in_loss.estimator", {"kl": {"in_loss": {"estimator": "k1", "coef": 0.1}}}, "zero expected gradient"),
    ("kl.in_loss.coef", {"kl": {"in_loss": {"coef": -0.1}}}, "must be 0 or more"),
    ("kl.in_reward.coef", {"kl": {"in_reward": {"controller": "adaptive"}}}, "can never move from 0"),
    (
        "kl.in_reward.target",
        {"kl": {"in_reward": {"controller": "adaptive", "coef": 0.1, "target": 0.0}}},
        "must be above 0",
    ),
    (
        "kl.in_reward.horizon",
        {"kl": {"in_reward": {"controller": "adaptive", "coef": 0.1, "horizon": 0}}},
        "must be above 0",
    ),
    ("correction.weight.high", {"correction": {"weight": WEIGHT | {"high": 0.0}}}, "must be above 0"),
    ("correction.weight.low", {"correction": {"weight": {"mode": "mask", "low": 3.0}}}, "must be in"),
    ("correction.reject[1].low", {"correction": {"reject": [{}, {"low": 3.0}]}}, "must not be above high=2.0"),
    ("old_log_probs", {"old_log_probs": "rollout", "correction": {"weight": WEIGHT}}, "nothing to correct"),
    ("old_log_probs", {"old_log_probs": "rollout", "correction": {"reject": [{}]}}, "nothing to correct"),
    ("overlong.buffer", {"overlong": {"max_length": 10, "buffer": 11}}, "at most overlong.max_length=10"),
    ("overlong.buffer", {"overlong": {"buffer": 0}}, "must be above 0"),
    ("overlong.factor", {"overlong": {"factor": -1.0}}, "must be 0 or more"),
    ("value_loss.clip", {"value_loss": {"clip": 0.0}}, "must be above 0"),
    ("entropy.coef", {"entropy": {"coef": math.inf}}, "must be finite"),
    *[(key, given, "finite") for key, given in INFINITE],
]


@pytest.mark.parametrize(("key", "given", "rule"), REFUSED, ids=[f"{key}-{n}" for n, (key, _, _) in enumerate(REFUSED)])
def test_a_broken_rule_names_its_key(key: str, given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_algorithm(given)
    broken = [violation for violation in refused.value.violations if violation.key == f"algorithm.{key}"]
    assert len(broken) == 1 and rule in broken[0].rule and broken[0].remedy


def test_a_bound_may_be_infinite() -> None:
    parse_algorithm({"policy_loss": {"clip": {"low": math.inf, "high": math.inf}}, "value_loss": {"clip": math.inf}})
    parse_algorithm({"correction": {"weight": {"high": math.inf}, "reject": [{"low": -math.inf, "high": math.inf}]}})


@pytest.mark.parametrize(
    ("sampling", "key", "rule"),
    [
        (DynamicSamplingConfig(max_rounds=-1), "max_rounds", "must be 0 or more"),
        (
            DynamicSamplingConfig(on_exhausted=OnExhausted.stop),
            "on_exhausted",
            "is not used with sampling.max_rounds=0",
        ),
        (DynamicSamplingConfig(oversample=1.5), "oversample", "is not used with sampling.max_rounds=0"),
        (DynamicSamplingConfig(max_rounds=2, oversample=0.5), "oversample", "must be 1 or more"),
        (DynamicSamplingConfig(max_rounds=2, oversample=math.nan), "oversample", "must be 1 or more"),
        (DynamicSamplingConfig(max_rounds=2, oversample=math.inf), "oversample", "finite"),
    ],
)
def test_sampling_control_that_cannot_work_is_refused(sampling: DynamicSamplingConfig, key: str, rule: str) -> None:
    (broken,) = algorithm_violations(AlgorithmConfig(sampling=sampling), samples_per_prompt=2)
    assert broken.key == f"algorithm.sampling.{key}" and rule in broken.rule and broken.remedy


def test_a_run_takes_no_engine_log_probs_where_more_than_those_is_read() -> None:
    algorithm = preset_of("otb")
    algorithm.old_log_probs = OldLogProbs.rollout
    (broken,) = algorithm_violations(algorithm, samples_per_prompt=4)
    assert broken.key == "algorithm.old_log_probs" and broken.value == "rollout" and broken.remedy
    assert broken.rule.startswith("leaves advantage.name=optimal_token_baseline without the sums of squared probabil")
    assert algorithm_violations(algorithm) == [], "a case brings the sums itself"


def test_a_run_takes_no_lower_bound_of_truncated_weights() -> None:
    algorithm = parse_algorithm({"correction": {"weight": WEIGHT | {"low": 0.25}}})
    (broken,) = algorithm_violations(algorithm, samples_per_prompt=1)
    assert broken.key == "algorithm.correction.weight.low" and "is not used by" in broken.rule and broken.remedy


def test_over_sampling_goes_with_dynamic_sampling() -> None:
    sampling = DynamicSamplingConfig(max_rounds=2, oversample=1.5)
    assert algorithm_violations(AlgorithmConfig(sampling=sampling), samples_per_prompt=2) == []


def test_a_rejection_of_tokens_on_which_both_engines_agree_is_noted() -> None:
    # The bounds that are left out are those of a ratio, 1 where the engines agree; k1, k2 and k3 are 0 there.
    assert algorithm_notes(parse_algorithm({"correction": {"reject": [{"estimator": "ratio"}]}})) == []
    assert algorithm_notes(parse_algorithm({"correction": {"reject": [{"estimator": "k3", "low": 0.0}]}})) == []
    (note,) = algorithm_notes(parse_algorithm({"correction": {"reject": [{}, {"estimator": "k3"}]}}))
    assert note.startswith("algorithm.correction.reject[1]: [0.5, 2] removes tokens on which both engines agree")


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"kl": {"in_reward": {"coef": 0.1, "target": 0.2}}}, "algorithm.kl.in_reward.target=0.2 has no effect with"),
        ({"kl": {"in_reward": {"horizon": 5}}}, "algorithm.kl.in_reward.horizon=5 has no effect with"),
        ({"kl": {"in_loss": {"estimator": "k2"}}}, "algorithm.kl.in_loss.estimator=k2 has no effect with"),
        ({"correction": {"weight": WEIGHT | {"low": 0.25}}}, "algorithm.correction.weight.low=0.25 has no effect with"),
        ({"seed": 3}, "algorithm.seed=3 has no effect with algorithm.policy_loss.name=ppo_clip"),
        ({"seed": 3, "policy_loss": {"name": "clip_cov"}}, None),
        ({"kl": {"in_reward": {"coef": 0.1, "controller": "adaptive", "target": 0.2}}}, None),
        ({"kl": {"in_loss": {"coef": 0.1, "estimator": "k2"}}}, None),
        ({}, None),
    ],
)
def test_settings_of_what_is_off_are_noted_and_not_refused(given: dict[str, Any], note: str | None) -> None:
    found = algorithm_notes(parse_algorithm(given))
    assert len(found) == (note is not None) and all(text.startswith(note or "") for text in found)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"advantage": {"alpha": 2.0}}, "leave it out, or use an advantage that reads it: gpg"),
        ({"policy_loss": {"delta": 0.3}}, "leave it out, or use a policy loss that reads it: dppo"),
    ],
)
def test_an_unused_constant_names_its_readers(given: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_algorithm(given)
    assert refused.value.violations[0].remedy == remedy


def test_all_broken_rules_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_algorithm({"policy_loss": {"clip": {"dual": 1.0}}, "kl": {"in_loss": {"estimator": "k1"}}})
    assert len(refused.value.violations) == 2


@pytest.mark.parametrize("given", [{"advantage": {"name": "grpo_passk"}}, {"sampling": {"max_rounds": 3}}])
def test_groups_of_one_are_refused_where_samples_are_compared(given: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig()
    algorithm.advantage.name = given.get("advantage", {}).get("name", "grpo")
    algorithm.sampling.max_rounds = given.get("sampling", {}).get("max_rounds", 0)
    assert len(algorithm_violations(algorithm, samples_per_prompt=1)) == 1
    assert algorithm_violations(algorithm, samples_per_prompt=2) == []


def test_switching_off_what_an_estimator_does_not_do_anyway_is_no_skipped_setting() -> None:
    parse_algorithm({"advantage": {"name": "grpo", "whiten": False}})
    parse_algorithm({"advantage": {"name": "rloo", "normalize_by_std": False}})


def test_a_plug_in_takes_every_constant() -> None:
    parse_algorithm({"advantage": {"name": "package.module:name", "gamma": 0.5}})


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.advantage.gama.*did you mean algorithm.advantage.gamma"):
        parse_algorithm({"advantage": {"gama": 0.5}})
    with pytest.raises(ConfigError, match=r"algorithm.correction.reject\[0\].hi"):
        parse_algorithm({"correction": {"reject": [{"hi": 2.0}]}})


def test_a_value_of_the_wrong_kind_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.clip\.low"):
        parse_algorithm({"policy_loss": {"clip": {"low": "much"}}})
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.aggregation"):
        parse_algorithm({"policy_loss": {"aggregation": "mean"}})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"kl": {"in_loss": {"coef": 0.1}}}, False),
        ({"kl": {"in_reward": {"coef": 0.1}}}, True),
        ({"correction": {"weight": WEIGHT}}, True),
        ({"correction": {"reject": [{}]}}, True),
        ({"advantage": {"name": "optimal_token_baseline"}}, True),
        ({"policy_loss": {"name": "kl_cov"}}, True),
    ],
)
def test_old_log_probs_may_be_left_out_only_when_nothing_reads_them(given: dict[str, Any], expected: bool) -> None:
    assert reads_old_log_probs(parse_algorithm(given)) == expected
