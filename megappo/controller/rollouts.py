"""Hop 1 and 2 of a step: draw prompts, generate, score as groups finish.

Shapes: B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megappo.config.rollout import SamplingConfig
from megappo.controller.ports import Draw, RewardClient, RolloutClient, SequenceInfo
from megappo.controller.state import LoopState
from megappo.data.types import Prompt
from megappo.errors import EngineError
from megappo.observability.metrics import Metrics, maximum, mean
from megappo.observability.timing import PhaseTimer
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoredRollouts:
    """The sequences of one generation, in order of their ids, with their scores. Tokens stay with the engines."""

    sequences: list[SequenceInfo]
    rewards: list[Reward]
    samples: dict[int, Sample]
    """Texts of the first few groups, by sequence id."""

    @property
    def scores(self) -> np.ndarray:
        """[B] float64."""
        return np.array([reward.score for reward in self.rewards], dtype=np.float64)

    @property
    def group_ids(self) -> np.ndarray:
        """[B] int64."""
        return np.array([info.group_id for info in self.sequences], dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence, prompt included, [B] int64."""
        return np.array([info.length for info in self.sequences], dtype=np.int64)

    @property
    def response_lengths(self) -> np.ndarray:
        """Sampled tokens per sequence, [B] int64."""
        return np.array([info.response_tokens for info in self.sequences], dtype=np.int64)

    @property
    def truncated(self) -> np.ndarray:
        """Whether the response ended by length, [B] bool."""
        return np.array([info.finish_reason == "length" for info in self.sequences], dtype=np.bool_)


def draw_prompts(prompts: Sequence[Prompt], state: LoopState, *, num_samples: int) -> list[Draw]:
    """Give every drawn prompt a fresh group id and its samples their sequence ids."""
    return [
        Draw(group_id=state.take_group_id(), prompt=prompt, sequence_ids=state.take_sequence_ids(num_samples))
        for prompt in prompts
    ]


def generate_and_score(
    draws: Sequence[Draw],
    sampling: SamplingConfig,
    *,
    rollout: RolloutClient,
    reward: RewardClient,
    seed: int,
    timer: PhaseTimer,
) -> ScoredRollouts:
    """Generate all draws; every group goes to the reward the moment it is finished.

    Raises:
        EngineError: an engine failed, or some groups never came back.
        WorkerError: scoring failed.
    """
    sequences: list[SequenceInfo] = []
    with timer.phase("generate"):
        for group in rollout.generate(draws, sampling, seed=seed):
            reward.submit(group)
            sequences += group.sequences
    missing = {draw.group_id for draw in draws} - {info.group_id for info in sequences}
    if missing:
        raise EngineError(f"{len(missing)} of {len(draws)} groups never came back from the engines: {sorted(missing)}")
    with timer.phase("score"):
        rewards, samples = reward.collect()
    sequences.sort(key=lambda info: info.sequence_id)
    return ScoredRollouts(
        sequences=sequences, rewards=[rewards[info.sequence_id] for info in sequences], samples=samples
    )


def rollout_metrics(rollouts: ScoredRollouts) -> Metrics:
    """Rewards and shapes of what was sampled. Means are over sequences unless the name says otherwise."""
    count = len(rollouts.sequences)
    scores, responses = rollouts.scores, rollouts.response_lengths
    metrics: Metrics = {
        "reward/mean": mean(float(scores.sum()), count),
        "reward/max": maximum(float(scores.max())),
        "rollout/response_tokens/mean": mean(float(responses.sum()), count),
        "rollout/response_tokens/max": maximum(float(responses.max())),
        "rollout/truncated_ratio": mean(float(rollouts.truncated.sum()), count),
        "rollout/empty_ratio": mean(float((responses == 0).sum()), count),
    }
    parts: dict[str, list[float]] = {}
    for reward in rollouts.rewards:
        for name, value in reward.parts.items():
            parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}/mean": mean(sum(found), len(found)) for name, found in parts.items()}
