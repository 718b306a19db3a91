"""Rules of the section `validation`: what is asked of the answers can be told from them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches

from megappo.config.run import RunConfig
from megappo.config.validation import SameAnswer, ValidationConfig, metric_prefix, statistic_names
from megappo.errors import Violation

_SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TAKEN_NAMES = ("part", "response_tokens", "reward", "source")
"""Where the metrics of a set without a name are: `val/reward/mean`."""

_SCORES = "reward"
"""Where the statistics of scores are, after the prefix of the set."""

_EVALUATED = ("cluster", "data", "model", "reward", "reward_model", "rollout", "run", "seed", "tracking", "validation")
_TRAINED = ("cluster.actor", "cluster.critic", "data.train", "rollout.parity", "rollout.partial", "rollout.sampling")
"""Keys below `_EVALUATED` that only training reads."""

_OF_ANSWERS = ("response_tokens/mean", "response_tokens/max", "truncated_ratio", "failed_rewards")


def validation_answers_differ(config: RunConfig) -> list[Violation]:
    """Several answers to a prompt are drawn: greedy ones would all be the same."""
    validation, sampling = config.validation, config.rollout.validation
    key, count = "validation.samples_per_prompt", validation.samples_per_prompt
    if count < 1:
        return [Violation(key=key, value=count, rule="must be at least 1", remedy="use 1 or more")]
    greedy = "rollout.validation.temperature=0" if sampling.temperature == 0 else "rollout.validation.top_k=1"
    if count == 1 or (sampling.temperature > 0 and sampling.top_k != 1):
        return []
    remedy = "use 1, or draw answers: rollout.validation.temperature=0.6"
    return [Violation(key=key, value=count, rule=f"needs answers that differ, and {greedy} is greedy", remedy=remedy)]


def pass_at_has_the_answers(config: RunConfig) -> list[Violation]:
    """Each k of validation.pass_at is named once, and there are so many answers."""
    asked, count = config.validation.pass_at, config.validation.samples_per_prompt
    key = "validation.pass_at"
    if len(set(asked)) < len(asked):
        return [Violation(key=key, value=asked, rule="names a number twice", remedy=f"use {sorted(set(asked))}")]
    wrong = [k for k in asked if not 1 <= k <= max(count, 1)]
    if not wrong:
        return []
    rule = f"must be between 1 and validation.samples_per_prompt={count}"
    remedy = f"leave {wrong[0]} out" if wrong[0] < 1 else f"leave {wrong[0]} out, or draw {max(wrong)} answers"
    return [Violation(key=key, value=asked, rule=rule, remedy=remedy)]


def intervals_are_possible(config: RunConfig) -> list[Violation]:
    """Confidence intervals have resamples, and leave some of them out."""
    validation = config.validation
    violations: list[Violation] = []
    if validation.bootstrap_samples < 0:
        key, value = "validation.bootstrap_samples", validation.bootstrap_samples
        violations.append(Violation(key=key, value=value, rule="must not be negative", remedy="0 is off"))
    if not 0 < validation.confidence < 1:
        key, value = "validation.confidence", validation.confidence
        violations.append(Violation(key=key, value=value, rule="must be between 0 and 1", remedy="use 0.95"))
    return violations


def validation_settings_are_used(config: RunConfig) -> list[Violation]:
    """What is changed has an effect: there are validation prompts, answers to compare, and so on."""
    validation, default = config.validation, ValidationConfig()
    unread: dict[str, tuple[str, str]] = {}
    if not validation_sets_of(config):
        off = ("there are no validation prompts", "leave it out, or name a source in data.validation")
        unread = dict.fromkeys((entry.name for entry in fields(ValidationConfig)), off)
    else:
        if validation.samples_per_prompt == 1:
            unread["majority"] = ("validation.samples_per_prompt=1", "leave it out, or draw more answers")
        if not validation.pass_at:
            unread["correct_from"] = ("validation.pass_at=[]", "leave it out, or name a number there")
        if validation.bootstrap_samples == 0:
            unread["confidence"] = ("validation.bootstrap_samples=0", "leave it out, or ask for resamples")
    return [
        Violation(
            key=f"validation.{name}",
            value=value.name if isinstance(value, SameAnswer) else value,
            rule=f"has no use with {why}" if "=" in why else f"has no use: {why}",
            remedy=remedy,
        )
        for name, (why, remedy) in unread.items()
        if (value := _value(validation, name)) != _value(default, name)
    ]


def _value(validation: ValidationConfig, name: str) -> int | float | str | bool | list[int] | SameAnswer:
    return getattr(validation, name)


def validation_sets_have_names_for_metrics(config: RunConfig) -> list[Violation]:
    """The name of a validation set is a part of metric names and of file names, and no other part's name."""
    return [
        Violation(
            key="data.validation_sets",
            value=name or "''",
            rule=f"is where other metrics are: val/{name}/..." if taken else "cannot be a part of a metric's name",
            remedy="choose another name" if taken else "use letters, digits, _ - and .",
        )
        for name in config.data.validation_sets
        if (taken := name in _TAKEN_NAMES) or not _SET_NAME.fullmatch(name) or not name.strip(".")
    ]


def there_is_something_to_evaluate(config: RunConfig) -> list[Violation]:
    """An evaluation has prompts."""
    if validation_sets_of(config):
        return []
    remedy = "name a source there, or several in data.validation_sets"
    return [Violation(key="data.validation", value="null", rule="is what is evaluated", remedy=remedy)]


def is_evaluated(key: str) -> bool:
    """Whether `megappo evaluate` reads a key: it has no use for what trains."""
    return key.split(".")[0] in _EVALUATED and not key.startswith(_TRAINED)


def validation_sets_of(config: RunConfig) -> list[str]:
    """Return the names of the validation sets; empty for the one of data.validation."""
    return list(config.data.validating())


def validation_metric_fault(name: str, config: RunConfig) -> tuple[str, str] | None:
    """Return rule and remedy if no validation of this run measures a metric `val/...`.

    Of the sources of a set, and of the parts of a reward, nothing is known before they are read.
    """
    sets = validation_sets_of(config)
    if not sets or config.trainer.test_freq == -1:
        why = "trainer.test_freq=-1" if sets else "there are no validation prompts"
        rule = f"is never measured: {why}"
        missing = "trainer.test_freq" if sets else "data.validation"
        return rule, f"set {missing}, or use a metric of training, such as reward/mean"
    measured = [f"{metric_prefix(one)}{metric}" for one in sets for metric in _metrics(config.validation)]
    if name in measured or any(_is_open(name, metric_prefix(one), config.validation) for one in sets):
        return None
    near = get_close_matches(name, measured, n=3)
    return "is not measured by this validation", f"use one of {', '.join(near or measured[:3])}"


def source_metric_fault(name: str, sources: Mapping[str, Collection[str]]) -> tuple[str, str] | None:
    """Return rule and remedy if a metric `val/...source/...` is of a source that no validation prompt has, or of the
    only one of its set.

    Args:
        sources: of the prompts, by set.
    """
    for one, found in sources.items():
        prefix = f"{metric_prefix(one)}source/"
        if not name.startswith(prefix):
            continue
        if len(found) > 1 and any(name.startswith(f"{prefix}{source}/") for source in found):
            return None
        rule = f"is not measured: the prompts are of {', '.join(sorted(found))}"
        if len(found) > 1:
            return rule, "name one of these sources"
        return f"{rule} alone", f"use {metric_prefix(one)}reward/mean"
    return None


def _metrics(validation: ValidationConfig) -> list[str]:
    """Return the names of all metrics of a set, after the prefix; those of sources and parts left out."""
    statistics = [f"{_SCORES}/{name}" for name in statistic_names(validation)]
    ends = [f"{name}/{end}" for name in statistics for end in ("low", "high")] if validation.bootstrap_samples else []
    return [*statistics, *_OF_ANSWERS, *ends]


def _is_open(name: str, prefix: str, validation: ValidationConfig) -> bool:
    """Whether the name is of a source or part, which only the data and the reward know."""
    rest = name.removeprefix(prefix)
    own = [metric for metric in _metrics(validation) if not metric.endswith(("/low", "/high"))]
    of_source = rest.startswith("source/") and any(rest.endswith(f"/{metric}") for metric in own)
    return rest != name and (of_source or re.fullmatch(r"(source/.+/)?part/.+/mean", rest) is not None)
