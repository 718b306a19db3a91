"""From the configuration to reward functions."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar, cast

from megappo.config.reward import RewardTerm, RewardTerms, terms_of
from megappo.errors import MegappoError, Violation
from megappo.registry import Registry
from megappo.rewards.calling import Term
from megappo.rewards.checks import REQUIRE_STOP, MissingParams, check_names, check_switch
from megappo.rewards.code import CodeReward
from megappo.rewards.composed import ComposedReward
from megappo.rewards.exact_match import ExactMatch
from megappo.rewards.format import Format
from megappo.rewards.http import HttpReward
from megappo.rewards.length import Length, Overlong
from megappo.rewards.math_verify import MathVerify
from megappo.rewards.model import ModelReward
from megappo.rewards.multiple_choice import MultipleChoice
from megappo.rewards.numeric import Numeric
from megappo.rewards.outside import batch_function, make_outside
from megappo.rewards.reasoning_gym import ReasoningGym
from megappo.rewards.repetition import Repetition
from megappo.rewards.reward_model import RewardModelScore
from megappo.rewards.types import LimitsItself, RewardFunction, Sample

Made = TypeVar("Made")


def from_params(kind: Callable[..., Made], **given: Any) -> Callable[[RewardTerm], Made]:  # Any: fields of `kind`
    """Return a maker that passes `params` to the fields of the dataclass `kind`.

    Args:
        given: field -> name of the key of RewardTerm that fills it.
    """

    own = [field for field in fields(kind) if field.init and field.name not in given]  # type: ignore[arg-type]
    known = [field.name for field in own]
    needed = [field.name for field in own if field.default is MISSING and field.default_factory is MISSING]

    def make(config: RewardTerm) -> Made:
        check_names(config.name, config.params, known=known, needed=needed)
        return kind(**{field: getattr(config, key) for field, key in given.items()}, **config.params)

    return make


# Any: a function of one sample returns what a reward may return, or an awaitable of it.
REWARDS: Registry[Callable[[RewardTerm], RewardFunction | Callable[[Sample], Any]]] = Registry("reward")
REWARDS.register("exact_match", from_params(ExactMatch))
REWARDS.register("multiple_choice", from_params(MultipleChoice))
REWARDS.register("numeric", from_params(Numeric))
REWARDS.register("reasoning_gym", from_params(ReasoningGym))
REWARDS.register("math_verify", from_params(MathVerify))
REWARDS.register("format", from_params(Format))
REWARDS.register("length", from_params(Length))
REWARDS.register("overlong", from_params(Overlong))
REWARDS.register("repetition", from_params(Repetition))
REWARDS.register("code", from_params(CodeReward))
REWARDS.register("http", from_params(HttpReward))
REWARDS.register("model", from_params(ModelReward, path="model_path"))
REWARDS.register("reward_model", from_params(RewardModelScore))


def make_reward(config: RewardTerms) -> ComposedReward:
    """Return the reward that a section of the configuration describes.

    Raises:
        DataError: a parameter is unknown or refused.
        RegistryError: no such reward.
    """
    return ComposedReward(terms={name: _make_term(name, term) for name, term in terms_of(config).items()})


def make_rewards(sections: Mapping[str, RewardTerms]) -> dict[str, ComposedReward]:
    """Return the reward of every section, by its name. Raises as `make_reward`."""
    return {name: make_reward(section) for name, section in sections.items()}


def reward_violations(sections: Mapping[str, RewardTerms], *, timeout_s: float) -> list[Violation]:
    """Return what is wrong with rewards that shows when they are made, all of it. A `model` is not loaded for that.

    Args:
        sections: by the key of the configuration that holds them.
        timeout_s: longest time of one call (`reward.timeout_s`).
    """
    found: list[Violation] = []
    for section, terms in sections.items():
        for name, term in terms_of(terms).items():
            unknown = term.name not in REWARDS.names() and ":" not in term.name  # another rule tells of that
            if unknown or term.name == "model":
                continue
            place = f"{section}.terms.{name}" if name else section
            key = place if name else f"{section}.name"
            try:
                found += _too_slow(_make_function(term), place, timeout_s)
            except MissingParams as error:
                found += [_missing(f"{place}.params.{param}", term.name) for param in error.names]
            except MegappoError as error:
                found.append(Violation(key=key, value=term.name, rule=f"cannot be made: {error}", remedy=_REMEDY))
            except Exception as error:  # the boundary to a reward from outside: whatever its class raises
                rule = f"cannot be made: it raised {type(error).__name__}: {error}"
                found.append(Violation(key=key, value=term.name, rule=rule, remedy=_REMEDY))
    return found


_REMEDY = "docs/rewards.md lists the rewards and their params"


def _missing(key: str, reward: str) -> Violation:
    return Violation(key=key, value="null", rule=f"must be given for the reward {reward}", remedy=f"add {key}=...")


def _too_slow(reward: object, place: str, timeout_s: float) -> list[Violation]:
    """A reward that limits its calls by itself does so before `reward.timeout_s` kills what it is doing."""
    limit = reward.call_limit if isinstance(reward, LimitsItself) else None
    if limit is None or limit.seconds < timeout_s:
        return []
    beside = f" with {limit.beside}" if limit.beside else ""
    return [
        Violation(
            key=f"{place}.params.{limit.param}",
            value=f"{getattr(reward, limit.param):g}",
            rule=f"lets a call take {limit.seconds:g} s{beside}, and reward.timeout_s={timeout_s:g} must be longer",
            remedy=f"lower it, or raise reward.timeout_s above {limit.seconds:g}",
        )
    ]


def _make_function(config: RewardTerm) -> object:
    """Return what scores: a function of one sample, or an object with `score`."""
    own = {key: value for key, value in config.params.items() if key != REQUIRE_STOP}
    check_switch(config.name, REQUIRE_STOP, config.params.get(REQUIRE_STOP, False))
    entry = REWARDS.get(config.name)
    return make_outside(config.name, entry, own) if ":" in config.name else entry(replace(config, params=own))


def _make_term(name: str, config: RewardTerm) -> Term:
    reward = _make_function(config)
    batch = batch_function(reward)
    return Term(
        label=f"reward term {name} ({config.name})" if name else f"reward {config.name}",
        weight=config.weight,
        score=batch,
        score_one=None if batch else cast(Callable[..., Any], reward),
        require_stop=config.params.get(REQUIRE_STOP, False),
    )
