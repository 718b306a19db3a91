"""Rewards: text in, scores out.

Owns the reward port, the shipped rewards and the process that runs them (`scorer`). Must not import ray. To add one: a
dataclass whose fields are its parameters, with `score(samples)`, plain or async, registered in `rewards.make` together
with an example in the contract test, which runs over the registry. From outside: `reward.name: package.module:name`, a
function of one sample or a class with `score` (docs/rewards.md).
"""

from megappo.rewards.composed import ComposedReward, error_of
from megappo.rewards.make import REWARDS, make_reward, make_rewards, reward_violations
from megappo.rewards.types import Failure, FailureKind, Reward, RewardFunction, Sample

__all__ = [
    "REWARDS",
    "ComposedReward",
    "Failure",
    "FailureKind",
    "Reward",
    "RewardFunction",
    "Sample",
    "error_of",
    "make_reward",
    "make_rewards",
    "reward_violations",
]
