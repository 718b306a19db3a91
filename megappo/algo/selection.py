"""The tokens that clip_cov and kl_cov treat apart: chosen once per update from the whole step.

Shapes: N packed tokens, M loss tokens of one shard, K tokens to select in the whole step.

Two small exchanges make the choice exact for any sharding: means over all loss tokens, then the K best keys of each
shard, whose K-th best overall is the threshold. kl_cov: key = covariance (lp_old - mean lp_old)(A - mean A), so the K
highest are chosen. clip_cov: key = a number in [0, 1) drawn from (seed, sequence id, position), for tokens with
covariance in bounds only, so K of them are chosen at random. Tokens that tie at the threshold are all chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megappo.algo.masked import Moments, compact, merge_moments
from megappo.batch.requests import TokenSelection, Whitening
from megappo.batch.stages import Experience
from megappo.config.algorithm import AlgorithmConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class LossTokens:
    """The loss tokens of one shard."""

    old_log_probs: np.ndarray
    """[M] float64."""
    advantages: np.ndarray
    """[M] float64, before whitening."""
    sequence_ids: np.ndarray
    """[M] int64."""
    positions: np.ndarray
    """[M] int64: position within the sequence."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SelectionMoments:
    """Moments over the loss tokens of one shard."""

    old_log_probs: Moments
    advantages: Moments


def loss_tokens_of(experience: Experience) -> LossTokens:
    """Return the loss tokens of a shard's experience."""
    assert experience.old_log_probs is not None, "a loss that selects tokens needs old log-probs"
    tokens = compact(experience.loss_mask, experience.offsets)
    return LossTokens(
        old_log_probs=tokens.gather(experience.old_log_probs),
        advantages=tokens.gather(experience.advantages),
        sequence_ids=experience.sequence_ids[tokens.sequence],
        positions=tokens.index - experience.offsets[tokens.sequence],
    )


def compute_selection_moments(tokens: LossTokens) -> SelectionMoments:
    """First exchange: moments of one shard."""
    return SelectionMoments(old_log_probs=Moments.of(tokens.old_log_probs), advantages=Moments.of(tokens.advantages))


def open_selection(parts: Sequence[SelectionMoments], whitening: Whitening | None) -> TokenSelection:
    """Merge the moments of all shards; the threshold is open (nothing is selected)."""
    return TokenSelection(
        mean_log_prob=merge_moments(part.old_log_probs for part in parts).mean,
        mean_advantage=merge_moments(part.advantages for part in parts).mean,
        scale=1.0 if whitening is None else whitening.inverse_std,
        threshold=np.inf,
    )


def count_selected(parts: Sequence[SelectionMoments], algorithm: AlgorithmConfig) -> int:
    """K: selected_fraction of the loss tokens of the step, at least one, none of none."""
    count = sum(part.advantages.count for part in parts)
    return max(1, int(algorithm.policy_loss.selected_fraction * count)) if count else 0


def best_keys(tokens: LossTokens, selection: TokenSelection, algorithm: AlgorithmConfig, *, count: int) -> np.ndarray:
    """Second exchange: the `count` best keys of one shard (fewer if it has fewer), float64."""
    keys = _keys(tokens, selection, algorithm)
    return np.sort(keys[keys > -np.inf])[::-1][:count]


def close_selection(selection: TokenSelection, keys: Sequence[np.ndarray], *, count: int) -> TokenSelection:
    """Set the threshold to the `count`-th best of the shards' best keys (the last one if there are fewer)."""
    best = np.sort(np.concatenate([np.zeros(0), *keys]))[::-1][:count]
    return replace(selection, threshold=float(best[-1]) if best.size else np.inf)


def select_tokens(tokens: LossTokens, selection: TokenSelection, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return which loss tokens of a shard are selected, [M] bool."""
    return _keys(tokens, selection, algorithm) >= selection.threshold


def select_at_once(tokens: LossTokens, algorithm: AlgorithmConfig, *, whitening: Whitening | None) -> np.ndarray:
    """Return which loss tokens are selected when one shard holds the whole step, [M] bool."""
    parts = [compute_selection_moments(tokens)]
    selection, count = open_selection(parts, whitening), count_selected(parts, algorithm)
    keys = best_keys(tokens, selection, algorithm, count=count)
    return select_tokens(tokens, close_selection(selection, [keys], count=count), algorithm)


def _keys(tokens: LossTokens, selection: TokenSelection, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return the key of each loss token, [M] float64; -inf: cannot be selected."""
    deviations = (tokens.old_log_probs - selection.mean_log_prob) * (tokens.advantages - selection.mean_advantage)
    covariance = deviations * selection.scale
    config = algorithm.policy_loss
    if config.name == "kl_cov":
        return covariance
    draw = _draw(algorithm.seed, tokens.sequence_ids, tokens.positions)
    in_bounds = (covariance >= config.covariance_low) & (covariance <= config.covariance_high)
    return np.where(in_bounds, draw, -np.inf)


def _draw(seed: int, sequence_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers in [0, 1) that depend on (seed, sequence id, position) only, [M] float64."""
    state = _mix(np.full(len(positions), seed % 2**64, dtype=np.uint64))
    state = _mix(state ^ sequence_ids.astype(np.uint64))
    state = _mix(state ^ positions.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele et al. 2014) on uint64, which wraps around."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
