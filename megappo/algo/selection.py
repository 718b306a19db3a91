"""The tokens that clip_cov and kl_cov treat apart: chosen once per update from the whole step.

Shapes: N packed tokens, M loss tokens of one shard, K tokens to select in the whole step.

Two small exchanges make the choice exact for any sharding: means over all loss tokens, then the K best keys of each
shard, whose K-th best overall is the threshold. kl_cov: key = covariance (lp_old - mean lp_old)(A - mean A), so the K
highest are chosen. clip_cov: key = a number in [0, 1) drawn from (seed, sequence id, position), for tokens with
covariance in bounds only, so K of them are chosen at random. Tokens that tie at the threshold are all chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megappo.algo.masked import Moments, compact, merge_moments
from megappo.batch.requests import TokenSelection, Whitening
from megappo.batch.stages import Experience
from megappo.config.algorithm import AlgorithmConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class SelectionMoments:
    """Moments over the loss tokens of one shard."""

    old_log_probs: Moments
    advantages: Moments
    """Before whitening."""


def compute_selection_moments(experience: Experience) -> SelectionMoments:
    """First exchange: moments of one shard."""
    assert experience.old_log_probs is not None, "a loss that selects tokens needs old log-probs"
    tokens = compact(experience.loss_mask, experience.offsets)
    return SelectionMoments(
        old_log_probs=Moments.of(tokens.gather(experience.old_log_probs)),
        advantages=Moments.of(tokens.gather(experience.advantages)),
    )


def start_selection(parts: Sequence[SelectionMoments], whitening: Whitening | None) -> TokenSelection:
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


def best_keys(experience: Experience, selection: TokenSelection, algorithm: AlgorithmConfig, count: int) -> np.ndarray:
    """Second exchange: the `count` best keys of one shard (fewer if it has fewer), float64."""
    keys = _keys(experience, selection, algorithm)
    keys = keys[keys > -np.inf]
    return keys if len(keys) <= count else np.partition(keys, len(keys) - count)[-count:] if count else keys[:0]


def close_selection(selection: TokenSelection, keys: Sequence[np.ndarray], count: int) -> TokenSelection:
    """Set the threshold to the `count`-th best of the shards' best keys."""
    best = np.sort(np.concatenate([np.zeros(0), *keys]))[-count:] if count else np.zeros(0)
    return TokenSelection(
        mean_log_prob=selection.mean_log_prob,
        mean_advantage=selection.mean_advantage,
        scale=selection.scale,
        threshold=float(best[0]) if best.size else np.inf,
    )


def select_tokens(experience: Experience, selection: TokenSelection, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return which tokens of a shard are selected, [N] bool; False off the loss mask."""
    tokens = compact(experience.loss_mask, experience.offsets)
    return tokens.scatter(_keys(experience, selection, algorithm) >= selection.threshold, dtype=np.bool_)


def _keys(experience: Experience, selection: TokenSelection, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return the key of each loss token, [M] float64; -inf: cannot be selected."""
    assert experience.old_log_probs is not None
    tokens = compact(experience.loss_mask, experience.offsets)
    log_probs = tokens.gather(experience.old_log_probs) - selection.mean_log_prob
    covariance = log_probs * (tokens.gather(experience.advantages) - selection.mean_advantage) * selection.scale
    config = algorithm.policy_loss
    if config.name == "kl_cov":
        return covariance
    position = tokens.index - experience.offsets[tokens.sequence]
    draw = _draw(algorithm.seed, experience.sequence_ids[tokens.sequence], position)
    in_bounds = (covariance >= config.covariance_low) & (covariance <= config.covariance_high)
    return np.where(in_bounds, draw, -np.inf)


def _draw(seed: int, sequence_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers in [0, 1) that depend on (seed, sequence id, position) only, [M] float64."""
    state = _mix(np.uint64(seed % 2**64) + np.zeros(len(positions), dtype=np.uint64))
    state = _mix(state ^ sequence_ids.astype(np.uint64))
    state = _mix(state ^ positions.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele et al. 2014) on uint64, which wraps around."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
