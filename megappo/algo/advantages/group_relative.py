"""Estimators that compare the samples of one prompt. All are given non-empty sequences only.

Shapes: B sequences. s_i: sum of the token rewards of sequence i; mean_g, std_g: over its group; G: samples of a group.
"""

import numpy as np

from megappo.algo.advantages.base import SequenceInputs
from megappo.algo.advantages.groups import ROUNDING, GroupedValues
from megappo.algo.errors import AlgorithmInputError
from megappo.algo.masked import Moments, whiten
from megappo.config.algorithm import AdvantageConfig

EPSILON = 1e-6
"""Added to a denominator that may be 0."""


def grpo(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Group-relative advantage.

    Formula: A_i = (s_i - mean_g) / (std_g + 1e-6), std unbiased (G - 1). `normalize_by_std: false` leaves the
        division out (Dr.GRPO). A group of one, and one whose spread is rounding error (std <= 1e-6 max|s|), gives 0.
    Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; Dr.GRPO: Liu et al. 2025, arXiv:2503.20783.
    Config: normalize_by_std.
    Use: the usual choice without a critic; several samples per prompt. Dr.GRPO (with token_sum_constant) removes the
        weight that the division gives to very easy and very hard prompts.
    """
    return _normalized(inputs.scores, inputs.group_ids, divide=config.normalize_by_std)


def _normalized(scores: np.ndarray, group_ids: np.ndarray, *, divide: bool) -> np.ndarray:
    groups = GroupedValues(scores, group_ids)
    deviations = groups.deviations()
    if not divide:
        return deviations
    std = groups.spread(groups.standard_deviations())
    # NaN compares false, so a non-finite score is passed on rather than turned into 0.
    return np.where(std == 0, 0.0, deviations / (std + EPSILON))


def rloo(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Leave-one-out baseline.

    Formula: A_i = s_i - mean of the other samples of the group = (s_i - mean_g) G / (G - 1). A group of one gives 0.
    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    Config: none.
    Use: an unbiased baseline that keeps the scale of the scores.
    """
    groups = GroupedValues(inputs.scores, inputs.group_ids)
    sizes = groups.spread(groups.sizes)
    return groups.deviations() * sizes / np.maximum(sizes - 1, 1)


def reinforce_plus_plus_baseline(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Group baseline with global normalisation.

    Formula: A_i = s_i - mean_g on every response token, then whitened over the response tokens of the global batch.
        A group of one gives 0 before whitening.
    Source: Hu 2025, REINFORCE++, arXiv:2501.03262.
    Config: whiten.
    Use: like grpo, with one scale for the whole batch in place of one per group.
    """
    return GroupedValues(inputs.scores, inputs.group_ids).deviations()


def opo(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Optimal baseline under the assumption that gradient norms grow with length.

    Formula: A_i = s_i - sum_j l_j s_j / sum_j l_j over the group, l = response tokens.
    Source: Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    Config: none.
    Use: exact on-policy training with responses of very different lengths.
    """
    groups = GroupedValues(inputs.scores, inputs.group_ids, tie_break=inputs.response_tokens)
    return groups.deviations(weights=inputs.response_tokens.astype(np.float64))


def gpg(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Group policy gradient.

    Formula: A_i = alpha (s_i - mean_g); alpha = B / max(1, samples in groups whose scores differ by more than rounding
        error, as in grpo), B the non-empty sequences of the batch, which makes up for groups without signal. A
        configured alpha replaces it.
    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    Config: alpha.
    Use: with the gpg loss: plain policy gradient without ratio, clip or reference.
    """
    groups = GroupedValues(inputs.scores, inputs.group_ids)
    alpha = config.alpha
    if alpha is None:
        alpha = len(inputs.scores) / max(1, int(groups.sizes[groups.have_signal()].sum()))
    return alpha * groups.deviations()


def grpo_passk(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Only the best sample of a group is rewarded, by its lead over the second.

    Formula: best: (s_best - s_second) / (std_g + 1e-6), std unbiased; others 0. A tie for the best gives 0.
    Source: Tang et al. 2025, arXiv:2503.19595.
    Config: none. Needs at least two samples per prompt.
    Use: when only the best of k answers counts.
    """
    groups = GroupedValues(inputs.scores, inputs.group_ids)
    # NaN sorts last, so a group with a non-finite score is passed on as non-finite rather than as 0.
    best = ~(inputs.scores < groups.spread(groups.maximum))
    std = groups.standard_deviations()
    lead = np.where(std == 0, 0.0, (groups.maximum - groups.second_largest) / (std + EPSILON))
    return np.where(best, groups.spread(lead), 0.0)


def best_leads(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Whether the best sample of the group is better than the second, [B] bool: the signal of grpo_passk."""
    groups = GroupedValues(inputs.scores, inputs.group_ids)
    return groups.spread(groups.have_signal() & groups.best_leads())


def maxrl(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Advantage relative to the group's mean score: hard prompts count more.

    Formula: A_i = (s_i - mean_g) / (mean_g + 1e-6), scores binary or non-negative.
    Source: Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.
    Config: none. A negative score is refused.
    Use: pass/fail rewards, to approach maximum likelihood of success.
    """
    negative = np.flatnonzero(inputs.scores < 0)
    if negative.size:
        rule = "is negative, which maxrl cannot take (use grpo, or scores >= 0)"
        raise AlgorithmInputError(int(inputs.sequence_ids[negative[0]]), "score", rule)
    groups = GroupedValues(inputs.scores, inputs.group_ids)
    return groups.deviations() / (groups.spread(groups.mean()) + EPSILON)


def gdpo(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Group-relative advantage per reward part, so that no part drowns another.

    Formula: A_i = sum_k weight_k (s_ik - mean_gk) / (std_gk + 1e-6), then (A - mean) / sqrt(var + 1e-8) over the
        non-empty sequences of the batch (var unbiased). A sequence without part k takes no part in its statistics.
    Source: Liu et al. 2026, GDPO, arXiv:2601.05242.
    Config: reward_keys, weights, whiten.
    Use: several rewards of different scale, for example correctness and format.

    Raises AlgorithmInputError for a key that no sequence has; it names the keys seen.
    """
    total = _weighted_parts(inputs, config)
    if not config.whiten:
        return total
    return whiten(total, Moments.of(np.sort(total)).whitening)


def parts_differ(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Whether the parts tell samples of the group apart, [B] bool: the signal of gdpo, which reads no total. Parts that
    cancel each other out, sample by sample, don't."""
    limit = ROUNDING * float(np.abs(config.weights or [1.0] * len(config.reward_keys)).sum())
    differs = ~(np.abs(_weighted_parts(inputs, config)) <= limit)
    return np.isin(inputs.group_ids, inputs.group_ids[differs])


def _weighted_parts(inputs: SequenceInputs, config: AdvantageConfig) -> np.ndarray:
    """Return the weighted sum of the normalised parts, [B]. Raises AlgorithmInputError for a part that nobody has."""
    parts = inputs.parts
    total = np.zeros(len(inputs.scores))
    for key, weight in zip(config.reward_keys, config.weights or [1.0] * len(config.reward_keys)):
        rows = np.array([row for row, part in enumerate(parts) if key in part], dtype=np.int64)
        if not rows.size:
            seen = ", ".join(sorted({name for part in parts for name in part})) or "none"
            raise AlgorithmInputError(int(inputs.sequence_ids[0]), "score", f"has no part {key!r} (keys seen: {seen})")
        values = np.array([parts[row][key] for row in rows], dtype=np.float64)
        total[rows] += weight * _normalized(values, inputs.group_ids[rows], divide=True)
    return total
