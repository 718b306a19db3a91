"""Rewards: text in, scores out.

Owns the reward port and the shipped rewards. Must not import ray. To add one: a dataclass whose fields are its
parameters, with `score`, registered in `REWARDS` here together with an example in the contract test, which runs over
the registry. From outside: `reward.name: package.module:name`, something that is called with the RewardConfig and
returns a RewardFunction.
"""

from megappo.rewards.make import REWARDS, make_reward
from megappo.rewards.types import Reward, RewardFunction, Sample

__all__ = ["REWARDS", "Reward", "RewardFunction", "Sample", "make_reward"]
