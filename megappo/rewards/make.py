"""From a RewardConfig to a reward function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from megappo.config.data import RewardConfig
from megappo.errors import DataError
from megappo.registry import Registry
from megappo.rewards.exact_match import ExactMatch
from megappo.rewards.math_verify import MathVerify
from megappo.rewards.model import ModelReward
from megappo.rewards.reasoning_gym import ReasoningGym
from megappo.rewards.types import Reward, RewardFunction, Sample

REQUIRE_STOP = "require_stop"
"""Parameter of every reward: a response that did not end by itself scores 0."""

Made = TypeVar("Made")


def from_params(kind: Callable[..., Made], **given: Any) -> Callable[[RewardConfig], Made]:  # Any: fields of `kind`
    """Return a maker that passes `reward.params` to the fields of the dataclass `kind`.

    Args:
        given: field -> name of the key of RewardConfig that fills it.
    """

    def make(config: RewardConfig) -> Made:
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


REWARDS: Registry[Callable[[RewardConfig], RewardFunction]] = Registry("reward")
REWARDS.register("exact_match", from_params(ExactMatch))
REWARDS.register("reasoning_gym", from_params(ReasoningGym))
REWARDS.register("math_verify", from_params(MathVerify))
REWARDS.register("model", from_params(ModelReward, path="model_path"))


def make_reward(config: RewardConfig) -> RewardFunction:
    """Return the reward that the configuration names.

    Raises:
        DataError: a parameter is unknown or refused.
        RegistryError: no such reward.
    """
    require_stop = config.params.get(REQUIRE_STOP, False)
    if not isinstance(require_stop, bool):
        raise DataError(f"reward {config.name}: params.{REQUIRE_STOP}={require_stop!r} must be true or false")
    own = {name: value for name, value in config.params.items() if name != REQUIRE_STOP}
    inner = REWARDS.get(config.name)(replace(config, params=own))
    return _Checked(name=config.name, inner=inner, require_stop=require_stop)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Checked:
    """A reward whose answers are checked, so that a faulty one cannot train a model on nonsense."""

    name: str
    inner: RewardFunction
    require_stop: bool

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples, in order. Raises DataError for a wrong number of rewards or a score that is not finite."""
        rewards = self.inner.score(samples) if samples else []
        if len(rewards) != len(samples):
            raise DataError(
                f"reward {self.name}: {len(rewards)} rewards for {len(samples)} samples (one each is needed)"
            )
        for sample, reward in zip(samples, rewards):
            if not math.isfinite(reward.score):
                raise DataError(
                    f"reward {self.name}: score {reward.score} is not finite, response {sample.response!r:.200}"
                )
        if not self.require_stop:
            return rewards
        return [
            reward if sample.finish_reason == "stop" else replace(reward, score=0.0)
            for sample, reward in zip(samples, rewards)
        ]
