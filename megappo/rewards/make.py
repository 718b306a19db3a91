"""From the configuration to reward functions."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from megappo.config.reward import RewardTerm, RewardTerms, terms_of
from megappo.errors import DataError, MegappoError, Violation
from megappo.registry import Registry
from megappo.rewards.calling import Term
from megappo.rewards.checks import check_switch
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
from megappo.rewards.types import RewardFunction, Sample

REQUIRE_STOP = "require_stop"
"""Parameter of every reward: a response that did not end by itself scores 0."""

Made = TypeVar("Made")


def from_params(kind: Callable[..., Made], **given: Any) -> Callable[[RewardTerm], Made]:  # Any: fields of `kind`
    """Return a maker that passes `params` to the fields of the dataclass `kind`.

    Args:
        given: field -> name of the key of RewardTerm that fills it.
    """

    def make(config: RewardTerm) -> Made:
        keys = {field: getattr(config, key) for field, key in given.items()}
        known = [field.name for field in fields(kind) if field.init and field.name not in given]  # type: ignore[arg-type]
        for name in config.params:
            if name not in known:
                raise DataError(
                    f"reward {config.name}: params.{name} is unknown (use {', '.join([*known, REQUIRE_STOP])})"
                )
        try:
            return kind(**keys, **config.params)
        except TypeError as error:
            raise DataError(f"reward {config.name}: params={config.params}: {error}") from error

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


def reward_violations(sections: Mapping[str, RewardTerms]) -> list[Violation]:
    """Return what is wrong with rewards that shows when they are made, all of it. A `model` is not loaded for that.

    Args:
        sections: by the key of the configuration that holds them.
    """
    found: list[Violation] = []
    for section, terms in sections.items():
        for name, term in terms_of(terms).items():
            unknown = term.name not in REWARDS.names() and ":" not in term.name  # another rule tells of that
            if unknown or term.name == "model":
                continue
            key = f"{section}.terms.{name}" if name else f"{section}.name"
            try:
                _make_term(name, term)
            except MegappoError as error:
                found.append(Violation(key=key, value=term.name, rule=f"cannot be made: {error}", remedy=_REMEDY))
            except Exception as error:  # the boundary to a reward from outside: whatever its class raises
                rule = f"cannot be made: it raised {type(error).__name__}: {error}"
                found.append(Violation(key=key, value=term.name, rule=rule, remedy=_REMEDY))
    return found


_REMEDY = "docs/rewards.md lists the rewards and their params"


def _make_term(name: str, config: RewardTerm) -> Term:
    require_stop = config.params.get(REQUIRE_STOP, False)
    check_switch(config.name, REQUIRE_STOP, require_stop)
    own = replace(config, params={key: value for key, value in config.params.items() if key != REQUIRE_STOP})
    entry = REWARDS.get(config.name)
    reward = make_outside(config.name, entry, own.params) if ":" in config.name else entry(own)
    batch = batch_function(reward)
    return Term(
        label=f"reward term {name} ({config.name})" if name else f"reward {config.name}",
        weight=config.weight,
        score=batch,
        score_one=None if batch else cast(Callable[..., Any], reward),
        require_stop=require_stop,
    )
