"""Rules of the algorithm section: each is a function named for the rule that returns the violations it finds.

Torch-free. The same rules hold for a run and for `megappo inspect algorithm`.
"""

import math
import sys
from dataclasses import fields
from typing import cast

from megappo.config.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    ClipConfig,
    CorrectionMode,
    CorrectionWeightConfig,
    KLController,
    OldLogProbs,
    OnExhausted,
    PolicyLossConfig,
    RejectEstimator,
)
from megappo.config.algorithm_declarations import ESTIMATOR_DECLARATIONS, LOSS_DECLARATIONS
from megappo.errors import Violation

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")


def algorithm_violations(algorithm: AlgorithmConfig, *, samples_per_prompt: int | None = None) -> list[Violation]:
    """Return every broken rule of the algorithm section; keys start with `algorithm.`.

    Args:
        samples_per_prompt: of a run, whose own rules are added; None for a case of `inspect`, which brings its groups.
    """
    violations = [violation for rule in _RULES for violation in rule(algorithm)]
    if samples_per_prompt is not None:
        violations += groups_are_large_enough(algorithm, samples_per_prompt)
        violations += old_log_probs_come_with_what_is_read(algorithm) + weight_bounds_are_used(algorithm)
    return violations


def algorithm_notes(algorithm: AlgorithmConfig) -> list[str]:
    """Return one line for each legal setting of the algorithm section that is likely a mistake or worth knowing."""
    notes: list[str] = []
    if algorithm.kl.in_reward.coef > 0 and algorithm.kl.in_loss.coef > 0:
        notes.append("algorithm.kl: the KL to the reference counts twice, in the reward and in the loss")
    for index, reject in enumerate(algorithm.correction.reject):
        agreement = 1.0 if reject.estimator is RejectEstimator.ratio else 0.0
        if not reject.low <= agreement <= reject.high:
            notes.append(
                f"algorithm.correction.reject[{index}]: [{reject.low:g}, {reject.high:g}] removes tokens on which both "
                f"engines agree, whose {reject.estimator.value} is {agreement:g}"
            )
    return notes + _notes_on_what_is_off(algorithm)


def _notes_on_what_is_off(algorithm: AlgorithmConfig) -> list[str]:
    """Settings of what is switched off: legal, since presets and experiments set them ahead of the switch."""
    kl, default, off = algorithm.kl, AlgorithmConfig(), list[tuple[str, object, object, str]]()
    if kl.in_reward.controller is KLController.fixed:
        why = "kl.in_reward.controller=fixed"
        off.append(("kl.in_reward.target", kl.in_reward.target, default.kl.in_reward.target, why))
        off.append(("kl.in_reward.horizon", kl.in_reward.horizon, default.kl.in_reward.horizon, why))
    for name, section, usual in (
        ("in_reward", kl.in_reward, default.kl.in_reward),
        ("in_loss", kl.in_loss, default.kl.in_loss),
    ):
        if section.coef == 0:
            off.append((f"kl.{name}.estimator", section.estimator, usual.estimator, f"kl.{name}.coef=0"))
    weight = algorithm.correction.weight
    if weight is not None and _has_idle_low(weight):
        off.append(
            ("correction.weight.low", weight.low, CorrectionWeightConfig().low, "correction.weight.mode=truncate")
        )
    if algorithm.policy_loss.name in LOSS_DECLARATIONS and algorithm.policy_loss.name != "clip_cov":
        off.append(("seed", algorithm.seed, default.seed, f"policy_loss.name={algorithm.policy_loss.name}"))
    return [
        f"algorithm.{key}={value} has no effect with algorithm.{why}"
        for key, value, usual, why in off
        if value != usual
    ]


def _violation(key: str, value: object, rule: str, remedy: str) -> Violation:
    return Violation(key=f"algorithm.{key}", value=value, rule=rule, remedy=remedy)


_FINITE = sys.float_info.max
"""Upper limit of numbers that take part in arithmetic; those that only bound others may be infinite (no bound)."""


def _out_of_range(checks: list[tuple[str, float | None, float, float]], *, open_low: bool = False) -> list[Violation]:
    """Check (key, value, low, high) rows; None passes, NaN never does. `open_low` excludes low itself."""
    violations: list[Violation] = []
    for key, value, low, high in checks:
        if value is None or (low < value <= high if open_low else low <= value <= high):
            continue
        bound = f"above {low:g}" if open_low else f"{low:g} or more"
        upper = "" if math.isinf(high) else " and finite" if high == _FINITE else f" and at most {high:g}"
        violations.append(_violation(key, value, f"must be {bound}{upper}", "use a number in that range"))
    return violations


def names_are_known(algorithm: AlgorithmConfig) -> list[Violation]:
    """Estimator and loss are built in, or named as `package.module:name`."""
    rows = [
        ("advantage.name", algorithm.advantage.name, ESTIMATOR_DECLARATIONS),
        ("policy_loss.name", algorithm.policy_loss.name, LOSS_DECLARATIONS),
    ]
    return [
        _violation(key, name, "is unknown", f"use one of {', '.join(sorted(known))}, or package.module:name")
        for key, name, known in rows
        if name not in known and ":" not in name
    ]


_A_SECTION = {"advantage": "an advantage", "policy_loss": "a policy loss"}
_SWITCHES_OFF = frozenset({"whiten", "normalize_by_std"})
"""Keys that may be false for every estimator: not to do what it does not do anyway is no skipped setting."""


def constants_are_used(algorithm: AlgorithmConfig) -> list[Violation]:
    """A constant that the estimator or loss does not read stays at its default."""
    violations: list[Violation] = []
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    if estimator is not None:
        used = estimator.keys | {"name"} | _SWITCHES_OFF
        set_keys = _non_default(algorithm.advantage, AdvantageConfig())
        name, table = algorithm.advantage.name, {name: entry.keys for name, entry in ESTIMATOR_DECLARATIONS.items()}
        violations += _unused("advantage", name, {key: set_keys[key] for key in set_keys.keys() - used}, table)
    loss = LOSS_DECLARATIONS.get(algorithm.policy_loss.name)
    if loss is not None:
        used = loss.keys | {"name", "clip", "aggregation", "constant_length"}
        set_keys = _non_default(algorithm.policy_loss, PolicyLossConfig())
        clip_keys = _non_default(algorithm.policy_loss.clip, ClipConfig())
        set_keys |= {f"clip.{key}": value for key, value in clip_keys.items()}
        name, table = algorithm.policy_loss.name, {name: entry.keys for name, entry in LOSS_DECLARATIONS.items()}
        violations += _unused("policy_loss", name, {key: set_keys[key] for key in set_keys.keys() - used}, table)
    return violations


def _non_default(section: AdvantageConfig | PolicyLossConfig | ClipConfig, default: object) -> dict[str, object]:
    values = {entry.name: cast(object, getattr(section, entry.name)) for entry in fields(section)}
    return {key: value for key, value in values.items() if value != getattr(default, key)}


def _unused(section: str, name: str, keys: dict[str, object], table: dict[str, frozenset[str]]) -> list[Violation]:
    violations: list[Violation] = []
    for key, value in sorted(keys.items()):
        readers = ", ".join(sorted(reader for reader, read in table.items() if key in read))
        remedy = f"leave it out, or use {_A_SECTION[section]} that reads it: {readers}"
        violations.append(_violation(f"{section}.{key}", value, f"is not used by {section}.name={name}", remedy))
    return violations


def advantage_constants_are_in_range(algorithm: AlgorithmConfig) -> list[Violation]:
    """Discounts are in [0, 1]; gpg's factor is positive; gdpo names its parts and weighs each once."""
    advantage = algorithm.advantage
    violations = _out_of_range([("advantage.gamma", advantage.gamma, 0, 1), ("advantage.lam", advantage.lam, 0, 1)])
    violations += _out_of_range([("advantage.alpha", advantage.alpha, 0, _FINITE)], open_low=True)
    if advantage.name != "gdpo":
        return violations
    keys, weights = advantage.reward_keys, advantage.weights
    if not keys or len(set(keys)) != len(keys):
        rule, remedy = "must name each reward part once for gdpo", "for example [correctness, format]"
        violations.append(_violation("advantage.reward_keys", keys, rule, remedy))
    if weights and len(weights) != len(keys):
        rule, remedy = f"must have one weight for each of {len(keys)} reward_keys", "leave it out for 1 each"
        violations.append(_violation("advantage.weights", weights, rule, remedy))
    if not all(math.isfinite(weight) for weight in weights):
        violations.append(_violation("advantage.weights", weights, "must be finite", "use finite numbers"))
    return violations


def penalties_reach_the_advantage(algorithm: AlgorithmConfig) -> list[Violation]:
    """KL in reward and the over-long penalty are not combined with an estimator that does not read them, nor with one
    that refuses the negative scores they make."""
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    if estimator is None:
        return []
    if not estimator.reads_penalties:
        rule = f"does not reach the advantages of {algorithm.advantage.name}, which reads reward parts only"
    elif estimator.refuses_negative_scores:
        rule = f"makes scores negative, which {algorithm.advantage.name} cannot take"
    else:
        return []
    violations: list[Violation] = []
    if algorithm.kl.in_reward.coef > 0:
        violations.append(_violation("kl.in_reward.coef", algorithm.kl.in_reward.coef, rule, "use kl.in_loss"))
    if algorithm.overlong is not None:
        violations.append(_violation("overlong", "set", rule, "use mask_truncated, or another advantage"))
    return violations


def clip_is_in_range(algorithm: AlgorithmConfig) -> list[Violation]:
    """Clip bounds are not negative; the dual clip is above 1."""
    clip = algorithm.policy_loss.clip
    violations = _out_of_range(
        [("policy_loss.clip.low", clip.low, 0, math.inf), ("policy_loss.clip.high", clip.high, 0, math.inf)]
    )
    if clip.dual is not None and not clip.dual > 1:
        rule = "must be above 1: it bounds the loss of negative advantages at ratio `dual`"
        violations.append(_violation("policy_loss.clip.dual", clip.dual, rule, "use 3.0, or null for off"))
    return violations


def loss_constants_are_in_range(algorithm: AlgorithmConfig) -> list[Violation]:
    """Temperatures, divergence bounds and selected shares make sense."""
    loss = algorithm.policy_loss
    violations = _out_of_range(
        [
            ("policy_loss.tau_positive", loss.tau_positive, 0, _FINITE),
            ("policy_loss.tau_negative", loss.tau_negative, 0, _FINITE),
            ("policy_loss.delta", loss.delta, 0, math.inf),
            ("policy_loss.selected_fraction", loss.selected_fraction, 0, 1),
        ],
        open_low=True,
    )
    violations += _out_of_range([("policy_loss.selected_kl_coef", loss.selected_kl_coef, 0, _FINITE)])
    if not loss.covariance_low <= loss.covariance_high:
        rule = f"must not be above policy_loss.covariance_high={loss.covariance_high}"
        violations.append(_violation("policy_loss.covariance_low", loss.covariance_low, rule, "use a smaller number"))
    return violations


def aggregation_fits_the_loss(algorithm: AlgorithmConfig) -> list[Violation]:
    """A loss defined with its own aggregation takes no other; a constant length goes with token_sum_constant."""
    loss = algorithm.policy_loss
    declared = LOSS_DECLARATIONS.get(loss.name)
    violations: list[Violation] = []
    if declared is not None and declared.fixed_aggregation and loss.aggregation not in (None, declared.aggregation):
        rule = f"conflicts with policy_loss.name={loss.name}, defined with {declared.aggregation.value}"
        violations.append(_violation("policy_loss.aggregation", _name(loss.aggregation), rule, "leave it out"))
    if loss.aggregation is Aggregation.token_sum_constant:
        if loss.constant_length is None:
            rule = "is needed by policy_loss.aggregation=token_sum_constant"
            remedy = "set the length that sums are divided by, for example the longest response"
            violations.append(_violation("policy_loss.constant_length", None, rule, remedy))
        violations += _out_of_range([("policy_loss.constant_length", loss.constant_length, 0, _FINITE)], open_low=True)
    elif loss.constant_length is not None:
        rule = f"is not used by policy_loss.aggregation={_name(loss.aggregation)}"
        remedy = "leave it out, or use token_sum_constant"
        violations.append(_violation("policy_loss.constant_length", loss.constant_length, rule, remedy))
    return violations


def _name(aggregation: Aggregation | None) -> str:
    return "null" if aggregation is None else aggregation.value


def kl_is_sound(algorithm: AlgorithmConfig) -> list[Violation]:
    """KL estimators are known and have a gradient where one is needed; coefficients are not negative; an adaptive
    coefficient can move."""
    in_reward, in_loss = algorithm.kl.in_reward, algorithm.kl.in_loss
    violations = _out_of_range(
        [("kl.in_reward.coef", in_reward.coef, 0, _FINITE), ("kl.in_loss.coef", in_loss.coef, 0, _FINITE)]
    )
    for key, estimator in (("in_reward", in_reward.estimator), ("in_loss", in_loss.estimator)):
        if estimator not in KL_ESTIMATORS:
            remedy = f"use one of {', '.join(KL_ESTIMATORS)}"
            violations.append(_violation(f"kl.{key}.estimator", estimator, "is unknown", remedy))
    if in_loss.estimator == "k1":
        rule = "has zero expected gradient, so as a loss it does nothing but add noise"
        violations.append(_violation("kl.in_loss.estimator", "k1", rule, "use k1+ (gradient of k2), k2 or k3"))
    if in_reward.controller is KLController.adaptive:
        violations += _out_of_range(
            [
                ("kl.in_reward.target", in_reward.target, 0, _FINITE),
                ("kl.in_reward.horizon", in_reward.horizon, 0, math.inf),
            ],
            open_low=True,
        )
        if in_reward.coef == 0:
            rule = "can never move from 0 with kl.in_reward.controller=adaptive"
            violations.append(_violation("kl.in_reward.coef", 0.0, rule, "start above 0, or use controller=fixed"))
    return violations


def correction_is_sound(algorithm: AlgorithmConfig) -> list[Violation]:
    """Bounds of the rollout correction are ordered and a cap is positive; nothing is corrected when old log-probs are
    the rollout engine's."""
    correction = algorithm.correction
    violations: list[Violation] = []
    if correction.weight is not None:
        weight = correction.weight
        violations += _out_of_range([("correction.weight.high", weight.high, 0, math.inf)], open_low=True)
        if weight.mode is CorrectionMode.mask and not 0 <= weight.low <= weight.high:
            rule = f"must be in [0, correction.weight.high={weight.high}]"
            violations.append(_violation("correction.weight.low", weight.low, rule, "use a smaller number, 0 or more"))
    for index, reject in enumerate(correction.reject):
        if not reject.low <= reject.high:
            rule = f"must not be above high={reject.high}"
            violations.append(_violation(f"correction.reject[{index}].low", reject.low, rule, "swap the two"))
    if algorithm.old_log_probs is OldLogProbs.rollout and correction.is_on:
        rule = "leaves nothing to correct: old and rollout log-probs are the same numbers"
        remedy = "use recompute, or leave correction out"
        violations.append(_violation("old_log_probs", "rollout", rule, remedy))
    return violations


def old_log_probs_come_with_what_is_read(algorithm: AlgorithmConfig) -> list[Violation]:
    """Engines report log-probs of sampled tokens and no more, so in a run an estimator that reads more takes the
    trainer's. (A case of `inspect` brings what it needs.)"""
    estimator = ESTIMATOR_DECLARATIONS.get(algorithm.advantage.name)
    if algorithm.old_log_probs is not OldLogProbs.rollout or estimator is None or not estimator.reads_sum_pi_squared:
        return []
    rule = (
        f"leaves advantage.name={algorithm.advantage.name} without the sums of squared probabilities that it reads: "
        "they come from the trainer's pass, which rollout leaves out"
    )
    return [_violation("old_log_probs", "rollout", rule, "use auto or recompute, or another advantage")]


def weight_bounds_are_used(algorithm: AlgorithmConfig) -> list[Violation]:
    """Truncated weights have no lower bound. (`inspect` says so in a note.)"""
    weight = algorithm.correction.weight
    if weight is None or not _has_idle_low(weight):
        return []
    rule = "is not used by correction.weight.mode=truncate, which bounds weights from above only"
    return [_violation("correction.weight.low", weight.low, rule, "leave it out, or use mode=mask")]


def _has_idle_low(weight: CorrectionWeightConfig) -> bool:
    return weight.mode is CorrectionMode.truncate and weight.low != CorrectionWeightConfig().low


def overlong_is_sound(algorithm: AlgorithmConfig) -> list[Violation]:
    """The over-long buffer lies within the length limit and the penalty is not a bonus."""
    overlong = algorithm.overlong
    if overlong is None:
        return []
    violations = _out_of_range([("overlong.factor", overlong.factor, 0, _FINITE)])
    if not 0 < overlong.buffer <= overlong.max_length:
        rule = f"must be above 0 and at most overlong.max_length={overlong.max_length}"
        violations.append(_violation("overlong.buffer", overlong.buffer, rule, "for example an eighth of max_length"))
    return violations


def value_loss_and_entropy_are_in_range(algorithm: AlgorithmConfig) -> list[Violation]:
    """The value clip is positive or off; the entropy coefficient is finite."""
    violations = _out_of_range([("value_loss.clip", algorithm.value_loss.clip, 0, math.inf)], open_low=True)
    if not math.isfinite(algorithm.entropy.coef):
        violations.append(_violation("entropy.coef", algorithm.entropy.coef, "must be finite", "use 0 for off"))
    return violations


def dynamic_sampling_is_sound(algorithm: AlgorithmConfig) -> list[Violation]:
    """Rounds are not negative and a round draws what is missing or more; an outcome is configured only where rounds
    can run out, more prompts are drawn only where groups are dropped."""
    sampling = algorithm.sampling
    violations = _out_of_range([("sampling.max_rounds", sampling.max_rounds, 0, math.inf)])
    violations += _out_of_range([("sampling.oversample", sampling.oversample, 1, _FINITE)])
    if sampling.max_rounds != 0:
        return violations
    if sampling.on_exhausted is not OnExhausted.train_partial:
        rule, remedy = "is not used with sampling.max_rounds=0 (off)", "set max_rounds, or leave it out"
        violations.append(_violation("sampling.on_exhausted", sampling.on_exhausted.value, rule, remedy))
    if sampling.oversample > 1:
        rule = "is not used with sampling.max_rounds=0 (off): no group is dropped, so every extra one would wait a step"
        remedy = "set max_rounds to 1 or more, or raise batching.prompts_per_step"
        violations.append(_violation("sampling.oversample", sampling.oversample, rule, remedy))
    return violations


def groups_are_large_enough(algorithm: AlgorithmConfig, samples_per_prompt: int) -> list[Violation]:
    """grpo_passk and dynamic sampling compare samples, so they need two of a prompt."""
    if samples_per_prompt >= 2:
        return []
    violations: list[Violation] = []
    if algorithm.advantage.name == "grpo_passk":
        rule, remedy = "needs at least two samples per prompt", "raise batching.samples_per_prompt"
        violations.append(_violation("advantage.name", "grpo_passk", rule, remedy))
    if algorithm.sampling.max_rounds > 0:
        rule = "drops groups whose scores are all equal, which a group of one always is"
        remedy = "raise batching.samples_per_prompt, or use 0"
        violations.append(_violation("sampling.max_rounds", algorithm.sampling.max_rounds, rule, remedy))
    return violations


_RULES = (
    names_are_known,
    constants_are_used,
    advantage_constants_are_in_range,
    penalties_reach_the_advantage,
    clip_is_in_range,
    loss_constants_are_in_range,
    aggregation_fits_the_loss,
    kl_is_sound,
    correction_is_sound,
    overlong_is_sound,
    value_loss_and_entropy_are_in_range,
    dynamic_sampling_is_sound,
)
