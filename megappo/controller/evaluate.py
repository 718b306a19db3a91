"""Validation: greedy (or configured) answers to held-out prompts. Never touches the training data position."""

from collections.abc import Sequence

from megappo.controller.rollouts import ScoredRollouts, draw_prompts, generate_and_score
from megappo.controller.state import DrawIds
from megappo.controller.step import Components
from megappo.data.types import Prompt
from megappo.observability.metrics import Metrics, mean, total
from megappo.observability.timing import PhaseTimer

_VALIDATION_IDS = 1 << 40
"""Validation draws take ids from here, so that training ids do not depend on how often one validates."""


def evaluate(parts: Components, prompts: Sequence[Prompt]) -> tuple[Metrics, ScoredRollouts]:
    """Answer every prompt once with `rollout.validation` and score it.

    Returns `val/reward/mean` (over prompts), `val/response_tokens/mean`, `val/truncated_ratio`, and the rollouts.
    """
    ids = DrawIds(next_group_id=_VALIDATION_IDS, next_sequence_id=_VALIDATION_IDS)
    timer = PhaseTimer()
    rollouts = generate_and_score(
        draw_prompts(prompts, ids, num_samples=1),
        parts.config.rollout.validation,
        rollout=parts.rollout,
        reward=parts.reward,
        seed=parts.config.seed,
        timer=timer,
    )
    parts.rollout.pack([], forget=[info.sequence_id for info in rollouts.sequences])
    count = len(rollouts.sequences)
    metrics: Metrics = {
        "timing/validate_s": total(timer.seconds("generate") + timer.seconds("score")),
        "val/reward/mean": mean(float(rollouts.scores.sum()), count),
        "val/response_tokens/mean": mean(float(rollouts.response_lengths.sum()), count),
        "val/truncated_ratio": mean(float(rollouts.truncated.sum()), count),
    }
    return metrics, rollouts
