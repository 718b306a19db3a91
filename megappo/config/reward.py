"""How responses are scored."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(kw_only=True, slots=True)
class RewardTerm:
    """One reward function and its weight in the score."""

    name: str = "exact_match"
    """Registry name (`megappo.rewards.REWARDS`), or `package.module:name`."""
    weight: float = 1.0
    # Any: the parameters belong to the reward, which checks them itself.
    params: dict[str, Any] = field(default_factory=dict)
    model_path: str | None = None
    """model: Hugging Face folder of a sequence-classification model (its first label is the score)."""


@dataclass(kw_only=True, slots=True)
class RewardTerms:
    """What is scored: one reward function, or the weighted sum of several."""

    name: str = "exact_match"
    """Registry name (`megappo.rewards.REWARDS`), or `package.module:name`."""
    # Any: the parameters belong to the reward, which checks them itself.
    params: dict[str, Any] = field(default_factory=dict)
    model_path: str | None = None
    """model: Hugging Face folder of a sequence-classification model (its first label is the score)."""
    terms: dict[str, RewardTerm] = field(default_factory=dict[str, RewardTerm])
    """Several reward functions, by name, in place of `name`, `params` and `model_path`: the score is the sum of
    weight * score, and each is also the metric `reward/<name>/mean`."""


def terms_of(section: RewardTerms) -> dict[str, RewardTerm]:
    """Return the reward functions of a section by name; the only one of a section without terms has the name ""."""
    if section.terms:
        return dict(section.terms)
    return {"": RewardTerm(name=section.name, params=section.params, model_path=section.model_path)}


class FailedReward(Enum):
    """What becomes of a response whose reward raises, hangs, or returns no finite number."""

    drop = "drop"
    """It is left out of its group; a group that has none left is left out of the step."""
    score = "score"
    """It gets `reward.failed_score`."""
    stop = "stop"
    """The run ends with the error."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(RewardTerms):
    """What is scored, and by whom: the processes, their limits, and what a failure means."""

    workers: int = 1
    """Scoring processes."""
    concurrency: int = 1
    """Calls that one process makes at the same time: more than 1 helps rewards that wait for something else."""
    timeout_s: float = 60.0
    """Longest time of one call: of a reward (each of the terms) for one sample, or for a group if it takes batches."""
    retries: int = 0
    """How often a sample is scored again whose reward raised, hung, or ended its process."""
    on_failure: FailedReward = FailedReward.stop
    failed_score: float = 0.0
    """Of on_failure=score."""
