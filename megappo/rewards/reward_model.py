"""Scores of the run's reward model on Megatron workers (section `reward_model`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.errors import DataError
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardModelScore:
    """The score that a sample brings along: the workers have read it before the sample comes to a scoring process."""

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Return the scores, in order. Raises DataError when the model has not scored a sample, and says why."""
        return [Reward(score=_score_of(sample)) for sample in samples]


def _score_of(sample: Sample) -> float:
    found = sample.model_score
    if found is None:
        raise DataError(
            "reward reward_model: no reward model has scored the sample (only a run asks one, as the section "
            "reward_model says)"
        )
    if found.score is None:
        raise DataError(f"reward reward_model: {found.problem}, response {sample.response!r:.200}")
    return found.score
