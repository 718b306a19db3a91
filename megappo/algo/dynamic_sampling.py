"""Dynamic sampling: which groups a step trains on and how many prompts are drawn in their place.

Invariants (asserted by tests/algo/test_dynamic_sampling.py):
1. Every group is in exactly one of kept, surplus and filtered; a group with signal is never filtered.
2. At most max_rounds rounds are drawn; the outcome when they run out is the configured one.
3. The decision does not depend on the order in which groups finished.
4. A round draws at least the prompts that are missing, so that it can fill the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megappo.config.algorithm import DynamicSamplingConfig, OnExhausted


class SamplingOutcome(Enum):
    """What the loop does next."""

    train = "train"
    """Enough groups: train on `kept`, give `surplus` to the next step."""
    refill = "refill"
    """Draw `refill` more prompts and decide again."""
    train_partial = "train_partial"
    """Out of rounds: train on the fewer groups in `kept` (none: skip the update)."""
    carry_over = "carry_over"
    """Out of rounds: train nothing; `kept` counts towards the next step."""
    stop = "stop"
    """Out of rounds: end the run with `message`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingDecision:
    """Groups by id, in ascending order (the order in which they were drawn)."""

    outcome: SamplingOutcome
    kept: list[int]
    surplus: list[int]
    """Groups with signal beyond the step's target: they are carried to the next step."""
    filtered: list[int]
    """Groups without signal."""
    refill: int
    """Prompts to draw."""
    message: str
    """Counts, for the log or the error."""


def decide_sampling(
    groups: Mapping[int, bool], *, target: int, rounds: int, config: DynamicSamplingConfig
) -> SamplingDecision:
    """Drop groups from which nothing is learned and draw other prompts in their place.

    Formula: a group has signal where the rewards' scores differ by more than rounding error (std > 1e-6 max|s|; before
        over-long penalty and KL); for gdpo, where its weighted parts do; for grpo_passk, where the best score leads
        the second; for remax, where a score differs from the greedy answer's. Groups with signal are kept up to the
        step's prompts; too few and rounds left: ceil(oversample * missing) prompts are drawn; no rounds left:
        train_partial trains on those there are, carry_over keeps them for the next step, stop ends the run. Groups
        beyond the step's prompts are the first of the next step, which draws that many fewer.
    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2.
    Config: sampling.max_rounds (0: off), sampling.oversample, sampling.on_exhausted.
    Use: many prompts are always or never solved, so that their groups carry no signal. oversample, about 1 / (share of
        groups with signal), fills a step in one round; the groups it carries over were sampled by older weights. With
        old_log_probs auto or recompute nothing accounts for that, since lp_old is of the weights at the start of the
        update: set correction.weight, or old_log_probs=rollout, whose ratio is to the policy that sampled.

    Args:
        groups: group id -> whether it carries signal (`megappo.algo.advantages.signal_by_group`); groups carried over
            from earlier steps included.
        target: groups (prompts) that a step trains on.
        rounds: rounds of generation done in this step; 0 only where the groups carried over are enough.
        config: with max_rounds > 0.
    """
    with_signal = sorted(group for group, signal in groups.items() if signal)
    filtered = sorted(group for group, signal in groups.items() if not signal)
    kept, surplus = with_signal[:target], with_signal[target:]
    missing = target - len(kept)
    if missing <= 0:
        outcome = SamplingOutcome.train
    elif rounds < config.max_rounds:
        outcome = SamplingOutcome.refill
    else:
        outcome = _EXHAUSTED[config.on_exhausted]
    message = (
        f"{len(with_signal)} of {len(groups)} groups carry signal, {len(filtered)} filtered, "
        f"{target} needed, round {rounds} of {config.max_rounds}"
    )
    return SamplingDecision(
        outcome=outcome,
        kept=kept,
        surplus=surplus,
        filtered=filtered,
        refill=prompts_to_draw(missing, config) if outcome is SamplingOutcome.refill else 0,
        message=message,
    )


def prompts_to_draw(missing: int, config: DynamicSamplingConfig) -> int:
    """Return how many prompts a round draws for `missing` groups: ceil(oversample * missing)."""
    # 1.1 * 10 is a little above 11 in binary; it is 11 prompts all the same.
    return max(missing, math.ceil(missing * config.oversample * (1 - 1e-12)))


_EXHAUSTED = {
    OnExhausted.train_partial: SamplingOutcome.train_partial,
    OnExhausted.carry_over: SamplingOutcome.carry_over,
    OnExhausted.stop: SamplingOutcome.stop,
}
