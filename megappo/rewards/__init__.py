"""Rewards: text in, scores out.

Owns the reward port and the shipped rewards. Must not import ray. To add one: a class with `score`, registered in
`REWARDS` here; the contract test runs over the registry.
"""
