"""Token rewards: the score on the last response token, the over-long penalty, KL in reward.

Shapes: N packed tokens, M response tokens, B sequences.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megappo.algo.errors import AlgorithmInputError
from megappo.algo.kl import K3_LIMIT, compute_kl
from megappo.algo.masked import MaskedTokens, compact, sequence_runs
from megappo.batch.stages import RolloutBatch, TokenField
from megappo.config.algorithm import AlgorithmConfig, OldLogProbs, OverlongConfig
from megappo.observability import metrics
from megappo.observability.metrics import Metrics


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardTotals:
    """Per-sequence results of the token rewards of one shard, in shard order."""

    returns: np.ndarray
    """[B] float64: sum of the token rewards on the mask, KL and penalties included (s_i)."""
    kl: np.ndarray
    """[B] float64: masked mean of the KL in reward per sequence; NaN where it is off or the sequence is empty."""
    metrics: Metrics


def compute_token_rewards(
    batch: RolloutBatch,
    *,
    scores: np.ndarray,
    truncated: np.ndarray,
    old_log_probs: TokenField | None,
    ref_log_probs: TokenField | None,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[TokenField, RewardTotals]:
    """Place each score on the last response token, add the over-long penalty there, subtract KL from every token.

    An empty sequence (no response token) gets no reward.

    Args:
        scores: [B] float64.
        truncated: [B] bool, True where the response ended by length.
        old_log_probs, ref_log_probs: needed when KL in reward is on; with `old_log_probs: rollout` the engine's own
            stand for the former.
        kl_coef: the coefficient of this step (the controller may have moved it).
    """
    old = None if old_log_probs is None else old_log_probs.values
    if algorithm.old_log_probs is OldLogProbs.rollout:
        old = batch.rollout_log_probs
    values = np.zeros(batch.num_tokens, dtype=np.float32)
    returns, kl = np.zeros(batch.num_sequences), np.zeros(batch.num_sequences)
    counts: list[Metrics] = [{"rollout/truncated_ratio": metrics.mean(truncated.sum(), len(truncated))}]
    for first, last in sequence_runs(batch.offsets):
        run = slice(batch.offsets[first], batch.offsets[last])
        tokens = compact(batch.response_mask[run], batch.offsets[first : last + 1] - run.start)
        rewards = place_on_last_token(scores[first:last], tokens)
        difference = None
        if algorithm.kl.in_reward.coef > 0:
            assert old is not None and ref_log_probs is not None, "KL in reward needs both log-probs"
            difference = tokens.gather(old[run]) - tokens.gather(ref_log_probs.values[run])
        rewards, kl[first:last], found = penalize(
            rewards, tokens, difference=difference, algorithm=algorithm, kl_coef=kl_coef
        )
        values[run][tokens.index] = rewards
        returns[first:last] = tokens.sums(rewards)
        counts.append(found)
    field = TokenField(offsets=batch.offsets, values=values, sequence_ids=batch.sequence_ids)
    return field, RewardTotals(returns=returns, kl=kl, metrics=metrics.merge(counts))


def place_on_last_token(scores: np.ndarray, tokens: MaskedTokens) -> np.ndarray:
    """Return token rewards [M] float64 with each score [B] on the last token of its sequence, 0 elsewhere."""
    rewards = np.zeros(len(tokens.index))
    occupied = tokens.lengths > 0
    rewards[tokens.offsets[1:][occupied] - 1] = scores[occupied]
    return rewards


def move_onto_tokens(rewards: np.ndarray, tokens: MaskedTokens, batch_offsets: np.ndarray) -> np.ndarray:
    """Return rewards [M] float64 from rewards given on all N tokens: one found off the mask moves to the last
    response token before it, else to the first one; those of an empty sequence are dropped.

    Raises:
        AlgorithmInputError: a reward off the mask is not finite; `sequence` is the row in the batch.
    """
    owner = np.repeat(np.arange(len(batch_offsets) - 1), np.diff(batch_offsets))
    strays = np.ones(len(rewards), dtype=bool)
    strays[tokens.index] = False
    strays &= (rewards != 0) & (tokens.lengths > 0)[owner]
    position = np.flatnonzero(strays)
    bad = ~np.isfinite(rewards[position])
    if bad.any():
        where = position[bad.argmax()]
        rule = f"is {rewards[where]} at token {where - batch_offsets[owner[where]]}, off the mask (use a finite number)"
        raise AlgorithmInputError(int(owner[where]), "rewards", rule)
    target = np.searchsorted(tokens.index, position) - 1
    target = np.maximum(target, tokens.offsets[owner[position]])
    moved = tokens.gather(rewards)
    np.add.at(moved, target, rewards[position].astype(np.float64))
    return moved


def penalize(
    rewards: np.ndarray,
    tokens: MaskedTokens,
    *,
    difference: np.ndarray | None,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[np.ndarray, np.ndarray, Metrics]:
    """Add the over-long penalty and subtract KL from token rewards [M].

    Args:
        difference: [M] old minus reference log-prob; None: KL in reward is off.

    Returns:
        Token rewards [M]; KL per sequence [B] (masked mean; NaN when off or empty); metrics
        (`rollout/empty_ratio` over sequences, `kl/in_reward/mean` over non-empty sequences,
        `kl/in_reward/capped_fraction` over response tokens).
    """
    lengths = tokens.lengths
    counts: Metrics = {"rollout/empty_ratio": metrics.mean((lengths == 0).sum(), len(lengths))}
    if algorithm.overlong is not None:
        penalty = compute_overlong_penalty(lengths, algorithm.overlong)
        rewards = rewards + place_on_last_token(penalty, tokens)
        counts["reward/overlong_penalty/mean"] = metrics.mean(penalty.sum(), len(lengths))
    if difference is None:
        return rewards, np.full(len(lengths), np.nan), counts
    estimator = algorithm.kl.in_reward.estimator
    kl = compute_kl(torch.as_tensor(difference), estimator).numpy()
    if estimator.startswith("k3"):
        counts["kl/in_reward/capped_fraction"] = metrics.mean(float((kl >= K3_LIMIT).sum()), len(difference))
    if not np.isfinite(difference.sum()):
        # k3 is bounded; an infinite difference must not vanish in the bound.
        kl = np.where(np.isfinite(difference), kl, np.nan)
    per_sequence = tokens.means(kl)
    counts["kl/in_reward/mean"] = metrics.mean(per_sequence[lengths > 0].sum(), (lengths > 0).sum())
    weighted = kl_coef * kl
    return np.subtract(rewards, weighted, out=weighted), per_sequence, counts


def compute_overlong_penalty(lengths: np.ndarray, config: OverlongConfig) -> np.ndarray:
    """Soft over-long penalty per sequence [B] (<= 0) from response lengths [B].

    Formula: clip(-(len - (max_length - buffer)) / buffer * factor, -factor, 0), len in response tokens.
    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13.
    Config: overlong.max_length, overlong.buffer, overlong.factor.
    Use: to keep responses away from the length limit without punishing the truncation itself.
    """
    excess = lengths - (config.max_length - config.buffer)
    return np.clip(-excess / config.buffer * config.factor, -config.factor, 0.0)
