"""Hop 1 and 2 of a step: draw prompts, generate, score as groups finish.

Shapes: B sequences.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megappo.algo.advantages.base import SequenceInputs
from megappo.config.rollout import SamplingConfig
from megappo.controller.ports import Draw, RewardClient, RolloutClient, SequenceInfo
from megappo.controller.state import DrawIds
from megappo.data.types import Prompt
from megappo.errors import EngineError
from megappo.observability.metrics import Metrics, Stat, maximum, mean, merge, total
from megappo.observability.timing import PhaseTimer
from megappo.rewards.types import Reward, Sample


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoredRollouts:
    """The sequences of one generation, in order of their ids, with their scores. Tokens stay with the engines."""

    sequences: list[SequenceInfo]
    rewards: list[Reward]
    samples: dict[int, Sample]
    """Texts of the first few groups, by sequence id."""
    greedy_scores: dict[int, float] = field(default_factory=dict[int, float])
    """Group id -> score of the greedy answer to its prompt, where one was asked for; NaN: its reward failed."""
    scoring: Metrics = field(default_factory=dict[str, Stat])
    """How the scoring of a generation went: of all its sequences, so part of no selection."""

    def select(self, groups: Collection[int]) -> "ScoredRollouts":
        """Return the sequences of some groups, and nothing of the others."""
        return self._only([index for index, info in enumerate(self.sequences) if info.group_id in groups])

    def without_failed(self) -> "ScoredRollouts":
        """Return the sequences that have a score; a group whose greedy answer has none leaves as a whole."""
        scored = [index for index, reward in enumerate(self.rewards) if reward.failure is None]
        if self.greedy_scores:
            scored = [index for index in scored if not math.isnan(self.greedy_scores[self.sequences[index].group_id])]
        return replace(self._only(scored), scoring=self.scoring)

    def _only(self, chosen: Sequence[int]) -> "ScoredRollouts":
        sequences = [self.sequences[index] for index in chosen]
        groups = {info.group_id for info in sequences}
        shown = self.samples.keys() & {info.sequence_id for info in sequences}
        return ScoredRollouts(
            sequences=sequences,
            rewards=[self.rewards[index] for index in chosen],
            samples={sequence_id: self.samples[sequence_id] for sequence_id in sorted(shown)},
            greedy_scores={group: score for group, score in self.greedy_scores.items() if group in groups},
        )

    def scores_by_group(self) -> dict[int, list[float]]:
        """Return the scores of the non-empty sequences of each group; none for a group of empty ones."""
        found: dict[int, list[float]] = {info.group_id: [] for info in self.sequences}
        for info, reward in zip(self.sequences, self.rewards):
            if info.sampled_tokens > 0:
                found[info.group_id].append(reward.score)
        return found

    @property
    def greedy_baseline(self) -> np.ndarray | None:
        """Score of the greedy answer to each sequence's prompt, [B] float64; None where none was asked for."""
        if not self.greedy_scores:
            return None
        return np.array([self.greedy_scores[info.group_id] for info in self.sequences], dtype=np.float64)

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
        """Tokens after the prompt per sequence, [B] int64."""
        return np.array([info.response_tokens for info in self.sequences], dtype=np.int64)

    @property
    def sampled_lengths(self) -> np.ndarray:
        """The sampled ones of them, [B] int64."""
        return np.array([info.sampled_tokens for info in self.sequences], dtype=np.int64)

    @property
    def policy_versions(self) -> np.ndarray:
        """Oldest version of the weights that sampled a token of each sequence, [B] int64."""
        return np.array([info.policy_version for info in self.sequences], dtype=np.int64)

    @property
    def truncated(self) -> np.ndarray:
        """Whether the response ended by length, [B] bool."""
        return np.array([info.finish_reason == "length" for info in self.sequences], dtype=np.bool_)


def sequence_inputs(rollouts: ScoredRollouts, scores: np.ndarray) -> SequenceInputs:
    """Return what estimators see of every sequence.

    Args:
        scores: [B] float64: as the reward gave them, or with what the algorithm adds.
    """
    return SequenceInputs(
        scores=scores,
        sequence_ids=np.array([info.sequence_id for info in rollouts.sequences], dtype=np.int64),
        group_ids=rollouts.group_ids,
        response_tokens=rollouts.sampled_lengths,
        parts=[reward.parts for reward in rollouts.rewards],
        greedy_scores=rollouts.greedy_baseline,
    )


def draw_prompts(prompts: Sequence[Prompt], ids: DrawIds, *, num_samples: int) -> list[Draw]:
    """Give every drawn prompt a fresh group id and its samples their sequence ids."""
    return [
        Draw(group_id=ids.take_group_id(), prompt=prompt, sequence_ids=ids.take_sequence_ids(num_samples))
        for prompt in prompts
    ]


def add_greedy(draws: Sequence[Draw], ids: DrawIds) -> dict[int, Draw]:
    """Return, by the group id of each draw, a draw of one greedy answer to the same prompt."""
    return {
        draw.group_id: Draw(
            group_id=ids.take_group_id(), prompt=draw.prompt, sequence_ids=ids.take_sequence_ids(1), greedy=True
        )
        for draw in draws
    }


def split_greedy(rollouts: ScoredRollouts, greedy: Mapping[int, Draw]) -> ScoredRollouts:
    """Take the greedy answers out of the sequences; their scores become `greedy_scores`."""
    scores = {info.group_id: reward.score for info, reward in zip(rollouts.sequences, rollouts.rewards)}
    sampled = rollouts.select({info.group_id for info in rollouts.sequences} - {d.group_id for d in greedy.values()})
    baselines = {group: scores[draw.group_id] for group, draw in greedy.items()}
    return replace(sampled, greedy_scores=baselines, scoring=rollouts.scoring)


def generate_and_score(
    draws: Sequence[Draw],
    sampling: SamplingConfig,
    *,
    rollout: RolloutClient,
    reward: RewardClient,
    seed: int,
    timer: PhaseTimer,
    wanted: int | None = None,
) -> ScoredRollouts:
    """Generate all draws, or until `wanted` of them are complete; every group goes to the reward the moment it is.

    Raises:
        EngineError: an engine failed, or some groups never came back.
        MegappoError: scoring failed, see `Scoring`.
    """
    sequences: list[SequenceInfo] = []
    scoring = reward.begin()
    with timer.phase("generate"):
        for group in rollout.generate(draws, sampling, seed=seed, wanted=wanted):
            scoring.submit(group)
            sequences += group.sequences
    missing = {draw.group_id for draw in draws} - {info.group_id for info in sequences}
    if len(draws) - len(missing) < (len(draws) if wanted is None else wanted):
        raise EngineError(f"{len(missing)} of {len(draws)} groups never came back from the engines: {sorted(missing)}")
    waited = -timer.seconds("score")
    with timer.phase("score"):
        scored = scoring.collect()
    waited += timer.seconds("score")
    sequences.sort(key=lambda info: info.sequence_id)
    rewards = [scored.rewards[info.sequence_id] for info in sequences]
    return ScoredRollouts(
        sequences=sequences,
        rewards=rewards,
        samples=scored.samples,
        scoring=merge([scored.metrics, failure_metrics(rewards), hidden_time(scored.busy_s, waited)]),
    )


def failure_metrics(rewards: Sequence[Reward]) -> Metrics:
    """Count the sequences whose reward failed, by kind; greedy answers count, too."""
    kinds = Counter(reward.failure for reward in rewards if reward.failure is not None)
    by_kind = {f"reward/failed/{kind}": total(count) for kind, count in sorted(kinds.items())}
    return {"reward/failed": total(kinds.total())} | by_kind


def hidden_time(busy_s: float, waited_s: float) -> Metrics:
    """Tell how much of the time that scoring took was hidden behind generation.

    Args:
        busy_s: seconds in which the longest process scored.
        waited_s: seconds that the step waited for scores when generation was over.
    """
    if busy_s <= 0:
        return {}
    hidden = max(0.0, busy_s - waited_s)
    return {"timing/reward_s": total(busy_s), "perf/reward_hidden_ratio": mean(hidden, busy_s)}


def join(parts: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """Return all sequences in order of their ids."""
    pairs = [pair for part in parts for pair in zip(part.sequences, part.rewards)]
    pairs.sort(key=lambda pair: pair[0].sequence_id)
    return ScoredRollouts(
        sequences=[info for info, _ in pairs],
        rewards=[reward for _, reward in pairs],
        samples={key: sample for part in parts for key, sample in part.samples.items()},
        greedy_scores={key: score for part in parts for key, score in part.greedy_scores.items()},
        scoring=merge(part.scoring for part in parts),
    )


def rollout_metrics(rollouts: ScoredRollouts) -> Metrics:
    """Rewards and shapes of what was sampled. Means are over sequences unless the name says otherwise."""
    count = len(rollouts.sequences)
    scores, responses = rollouts.scores, rollouts.response_lengths
    metrics: Metrics = {
        "reward/mean": mean(float(scores.sum()), count),
        "reward/max": maximum(float(scores.max(initial=-np.inf)), count),
        "rollout/response_tokens/mean": mean(float(responses.sum()), count),
        "rollout/response_tokens/max": maximum(float(responses.max(initial=0)), count),
    }
    parts: dict[str, list[float]] = {}
    for reward in rollouts.rewards:
        for name, value in reward.parts.items():
            parts.setdefault(name, []).append(value)
    named = {f"reward/{name}/mean": mean(sum(found), len(found)) for name, found in parts.items()}
    return metrics | named | program_metrics(rollouts) | rollouts.scoring


def program_metrics(rollouts: ScoredRollouts) -> Metrics:
    """Tell what rollout programs did: their own counts, and tokens that the policy sampled and others; nothing where
    engines answer prompts directly."""
    counts: dict[str, list[float]] = {}
    for info in rollouts.sequences:
        for name, value in info.counts.items():
            counts.setdefault(name, []).append(value)
    if not counts:
        return {}
    number, sampled = len(rollouts.sequences), float(rollouts.sampled_lengths.sum())
    return {
        "rollout/sampled_tokens/mean": mean(sampled, number),
        "rollout/observation_tokens/mean": mean(float(rollouts.response_lengths.sum()) - sampled, number),
    } | {f"rollout/agent/{name}/mean": mean(sum(found), len(found)) for name, found in sorted(counts.items())}


def partial_metrics(complete: ScoredRollouts, begun: Collection[int], *, unfinished: int) -> Metrics:
    """Tell how far over-sampling with early stop sorts answers by length: who finishes first is short, so groups that
    completed in the step they began in have shorter answers than those that had to go on.

    Args:
        complete: the groups that this step's generation completed.
        begun: groups that an earlier step began.
        unfinished: groups that the next step goes on with.
    """
    groups = complete.scores_by_group().keys()
    continued = complete.select(groups & set(begun)).response_lengths
    first = complete.select(groups - set(begun)).response_lengths
    return {
        "rollout/partial/unfinished": total(unfinished),
        "rollout/partial/continued": total(len(groups & set(begun))),
        "rollout/partial/first_response_tokens/mean": mean(float(first.sum()), len(first)),
        "rollout/partial/continued_response_tokens/mean": mean(float(continued.sum()), len(continued)),
    }
