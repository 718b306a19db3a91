"""The weighted sum of reward functions, as one."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megappo.errors import DataError, RewardError
from megappo.rewards.calling import Caller, Outcome, Term
from megappo.rewards.types import Failure, Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class ComposedReward:
    """What scores the samples of one source: score = sum over terms of weight * score of the term.

    Parts: the score of every term by its name, before its weight, and the term's own parts as `<term>/<part>`. The one
    reward of a configuration without `reward.terms` has no name: its score and parts are passed on as they are.
    """

    terms: Mapping[str, Term]
    """By name; a single one named "" where the configuration names no terms."""

    async def outcomes(self, samples: Sequence[Sample], caller: Caller) -> list[Outcome]:
        """Return what became of every sample, in order."""
        found = {name: await term.outcomes(samples, caller) for name, term in self.terms.items()}
        weights = {name: term.weight for name, term in self.terms.items()}
        return [join_terms({name: found[name][index] for name in found}, weights) for index in range(len(samples))]

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Score the samples here and now, in order, outside of any event loop.

        Raises:
            DataError: a reward refuses a sample or its row.
            RewardError: a reward raised, or returned something else than one finite number each.
        """
        if not samples:
            return []
        rewards: list[Reward] = []
        for outcome in asyncio.run(self.outcomes(samples, Caller())):
            if isinstance(outcome, Failure):
                raise error_of(outcome)
            rewards.append(outcome)
        return rewards


def join_terms(of_terms: Mapping[str, Outcome], weights: Mapping[str, float]) -> Outcome:
    """Return what the terms of a sample come to. The first term that failed is the sample's failure.

    Args:
        weights: by term, in the order of the configuration.
    """
    rewards: dict[str, Reward] = {}
    for name in weights:
        outcome = of_terms[name]
        if isinstance(outcome, Failure):
            return outcome
        rewards[name] = outcome
    if "" in rewards:
        return rewards[""]
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        parts |= {name: reward.score} | {f"{name}/{part}": value for part, value in reward.parts.items()}
    # An answer for the majority is that of the one term that reads one.
    read = [reward.extracted for reward in rewards.values() if reward.extracted is not None]
    return Reward(
        score=sum(weights[name] * reward.score for name, reward in rewards.items()),
        parts=parts,
        extracted=read[0] if len(read) == 1 else None,
    )


def error_of(failure: Failure) -> DataError | RewardError:
    """Return the error that ends a run (or a call of `score`) for a failure."""
    if failure.refused:
        return DataError(failure.message)
    return RewardError(failure.message)
