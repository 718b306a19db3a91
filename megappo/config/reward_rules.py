"""Rules about rewards, and which sections of the configuration describe one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config.reward import FailedReward, RewardConfig, RewardTerm, RewardTerms, terms_of
from megappo.config.run import RunConfig
from megappo.errors import Violation

REWARD_MODEL = "reward_model"
"""Name of the reward that is the score of the run's reward model, and of the model's role."""
_TERM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_TAKEN = ("failed", "failed_groups", "max", "mean", "overlong_penalty")
"""Names of other metrics below `reward/`."""


def reward_sections(config: RunConfig) -> dict[str, RewardTerms]:
    """Return what a sample may be scored by: "" is the run's reward; that of a source is under the key of the source
    (`data.train_sources.math`), which is also `Prompt.reward` of its prompts."""
    own = {key: source.reward for key, source in config.data.by_key().items() if source.reward is not None}
    return {"": config.reward} | own


def reward_keys(config: RunConfig) -> dict[str, RewardTerms]:
    """Return the same by the keys that hold the sections: `reward`, `data.train.reward`, ..."""
    return {f"{name}.reward".lstrip("."): section for name, section in reward_sections(config).items()}


def reward_terms(config: RunConfig) -> Iterator[tuple[str, RewardTerm]]:
    """Yield every reward function of the run with the key of its section: `reward`, `reward.terms.format`."""
    for key, section in reward_keys(config).items():
        for name, term in terms_of(section).items():
            yield (f"{key}.terms.{name}" if name else key), term


def model_rewards(config: RunConfig) -> dict[str, RewardTerm]:
    """Return the terms that are scored by a model of their own, by key."""
    return {key: term for key, term in reward_terms(config) if term.name == "model"}


def asks_reward_model(config: RunConfig) -> bool:
    """Whether a reward of this run is the score of the reward model on Megatron workers."""
    return any(term.name == REWARD_MODEL for _, term in reward_terms(config))


def reward_terms_replace_the_name(config: RunConfig) -> list[Violation]:
    """A section gives either one reward or terms: what would not be read is refused."""
    default = RewardTerms()
    violations: list[Violation] = []
    for key, section in reward_keys(config).items():
        for name in ("name", "params", "model_path"):
            value = getattr(section, name)
            if section.terms and value != getattr(default, name):
                rule = f"is not read beside {key}.terms"
                remedy = f"make it a term, or take it out with {key}.{name}={_written(getattr(default, name))}"
                violations.append(Violation(key=f"{key}.{name}", value=value, rule=rule, remedy=remedy))
    return violations


def _written(value: object) -> str:
    return "null" if value is None else str(value)


def reward_terms_can_be_metrics(config: RunConfig) -> list[Violation]:
    """The name of a term is a metric's name, and not that of another metric."""
    violations: list[Violation] = []
    for key, section in reward_keys(config).items():
        for name in section.terms:
            if name in _TAKEN:
                rule, remedy = f"is taken by the metric reward/{name}", "choose another name"
            elif not _TERM_NAME.fullmatch(name):
                rule, remedy = "cannot be part of a metric's name", "use letters, digits and underscores"
            else:
                continue
            violations.append(Violation(key=f"{key}.terms", value=name, rule=rule, remedy=remedy))
    return violations


def a_term_has_weight(config: RunConfig) -> list[Violation]:
    """Terms of weight 0 are measured only; with no other the score is always 0."""
    return [
        Violation(
            key=f"{key}.terms",
            value=f"{{{', '.join(section.terms)}}}",
            rule="all have weight 0, so every score is 0",
            remedy="give one of them a weight",
        )
        for key, section in reward_keys(config).items()
        if section.terms and not any(term.weight for term in section.terms.values())
    ]


def failed_rewards_can_be_handled(config: RunConfig) -> list[Violation]:
    """A score for failed rewards is given where it is used, and fits the estimator."""
    reward, estimator = config.reward, config.algorithm.advantage.name
    if reward.on_failure is not FailedReward.score:
        if reward.failed_score == RewardConfig().failed_score:
            return []
        rule, remedy = "is not read with reward.on_failure=" + reward.on_failure.name, "use reward.on_failure=score"
        return [Violation(key="reward.failed_score", value=reward.failed_score, rule=rule, remedy=remedy)]
    if estimator == "gdpo":
        rule = "gives a failed reward no parts, and gdpo reads nothing else"
        return [Violation(key="reward.on_failure", value="score", rule=rule, remedy="use drop or stop")]
    if estimator == "maxrl" and reward.failed_score < 0:
        rule, remedy = "is negative, which maxrl cannot take", "use 0 or more"
        return [Violation(key="reward.failed_score", value=reward.failed_score, rule=rule, remedy=remedy)]
    return []


@dataclass(kw_only=True, slots=True, frozen=True)
class _LengthPenalty:
    """A penalty on answers of more than `begin` tokens."""

    key: str
    value: int
    begin: int
    beside: str = ""
    """What else it depends on."""
    sampling: str = "sampling"
    """The section of `rollout` that the answers are of."""


def length_penalties_can_bite(config: RunConfig) -> list[Violation]:
    """A penalty for long answers begins below the longest one that can be sampled: else it is always 0."""
    violations: list[Violation] = []
    for penalty in _length_penalties(config):
        section = config.rollout.validation if penalty.sampling == "validation" else config.rollout.sampling
        if penalty.begin < section.max_new_tokens:
            continue
        longest = f"rollout.{penalty.sampling}.max_new_tokens"
        rule = (
            f"{penalty.beside}is a penalty on answers of more than {penalty.begin} tokens, and "
            f"{longest}={section.max_new_tokens} lets none be longer: it is always 0"
        )
        remedy = f"lower it, or raise {longest}"
        violations.append(Violation(key=penalty.key, value=penalty.value, rule=rule, remedy=remedy))
    return violations


def _length_penalties(config: RunConfig) -> Iterator[_LengthPenalty]:
    """Yield those whose numbers are whole; others are refused where rewards are made."""
    for key, term in reward_terms(config):
        sampling = "validation" if key.startswith("data.validation") else "sampling"
        params, place = term.params, f"{key}.params"
        match term.name, params:
            case "overlong", {"max_tokens": int(most), "buffer_tokens": int(buffer)}:
                yield _LengthPenalty(
                    key=f"{place}.max_tokens",
                    value=most,
                    begin=most - buffer,
                    beside=f"with buffer_tokens={buffer} ",
                    sampling=sampling,
                )
            case "length", {"target_tokens": int(target)} if params.get("both_sides") is not True:
                yield _LengthPenalty(key=f"{place}.target_tokens", value=target, begin=target, sampling=sampling)
            case _:
                pass
    if (taken_off := config.algorithm.overlong) is not None:
        yield _LengthPenalty(
            key="algorithm.overlong.max_length",
            value=taken_off.max_length,
            begin=taken_off.max_length - taken_off.buffer,
            beside=f"with buffer={taken_off.buffer} ",
        )


def model_rewards_have_a_model(config: RunConfig) -> list[Violation]:
    """The reward `model` names its folder."""
    remedy = "give the folder of a sequence-classification model"
    rule = "must be given for the reward `model`"
    return [
        Violation(key=f"{key}.model_path", value="null", rule=rule, remedy=remedy)
        for key, term in model_rewards(config).items()
        if not term.model_path
    ]


def model_reward_workers_fit_their_pool(config: RunConfig) -> list[Violation]:
    """Each process with a reward model takes a share of a device of its own."""
    devices = config.cluster.pools.get(config.cluster.reward)
    if not model_rewards(config) or devices is None or config.reward.workers <= devices:
        return []
    rule = f"is more than the {devices} devices of pool {config.cluster.reward!r}"
    return [Violation(key="reward.workers", value=config.reward.workers, rule=rule, remedy=f"use at most {devices}")]
