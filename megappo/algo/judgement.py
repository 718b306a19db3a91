"""What several answers to each prompt say about a policy, and how sure one can be of it.

Shapes: P prompts, n answers to a prompt, R resamples.

- A statistic is a number per prompt, then a mean over prompts: a prompt with fewer answers (the reward of some failed)
  weighs as much as the others.
- Nothing depends on the order of prompts or of the answers to one; ties are means, never a first one.
- Intervals resample prompts, not answers: answers to one prompt are not independent of each other. The same numbers and
  seed give the same interval, whatever else is computed.
"""

from collections.abc import Sequence

import numpy as np

_CELLS = 1 << 22
"""Most numbers of a bootstrap held at once."""


def pass_at_k(correct: np.ndarray, answers: np.ndarray, k: int) -> np.ndarray:
    """Return the chance that k answers drawn without replacement hold a correct one, per prompt.

    1 - C(n - c, k) / C(n, k) as a product of k ratios, each in [0, 1]: unbiased where the plug-in estimate
    1 - (1 - c / n) ** k is not, and no binomial overflows (Chen et al. 2021, arXiv:2107.03374, section 2.1).

    Args:
        correct: correct answers c, [P] int.
        answers: answers n, [P] int.

    Returns:
        [P] float64; NaN where a prompt has fewer than k answers.
    """
    wrong = answers - correct
    all_wrong = np.ones(len(answers))
    for drawn in range(k):
        left = answers - drawn
        all_wrong *= np.maximum(wrong - drawn, 0) / np.maximum(left, 1)
    return np.where(answers >= k, 1.0 - all_wrong, np.nan)


def majority_score(scores: Sequence[float], votes: Sequence[str]) -> float:
    """Return the score of the answer that most of the votes are for.

    The mean score of the answers with that vote (they differ where a reward looks at more than the answer); the mean
    over the answers that tie, as if one of them were drawn. Without any vote, the mean score of all.

    Args:
        scores: of the answers to one prompt, at least one.
        votes: what each of them answers; empty: it has no vote.
    """
    by_vote: dict[str, list[float]] = {}
    for score, vote in zip(scores, votes, strict=True):
        if vote:
            by_vote.setdefault(vote, []).append(score)
    if not by_vote:
        return float(np.mean(scores))
    most = max(map(len, by_vote.values()))
    # Sorted, since the last bit of a sum depends on its order.
    return float(np.mean(sorted(np.mean(sorted(found)) for found in by_vote.values() if len(found) == most)))


def bootstrap_interval(
    values: np.ndarray, *, resamples: int, confidence: float, seed: int
) -> tuple[float, float] | None:
    """Return a percentile bootstrap interval of the mean (Efron 1979): prompts are drawn with replacement R times, and
    the middle `confidence` of the R means is kept.

    With few prompts it is too narrow, and with equal values it has no width: it knows of no other values.

    Args:
        values: a number per prompt, [P] float64.

    Returns:
        Lower and upper end; None without values or resamples.
    """
    if len(values) == 0 or resamples == 0:
        return None
    means = _resampled_means(values, resamples=resamples, seed=seed)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _resampled_means(values: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """Return the mean of each resample, [R] float64.

    How often each different value is drawn is multinomial. Scores have few different values, so that drawing the counts
    is some hundred times faster than drawing prompts one by one.
    """
    random = np.random.default_rng(seed)
    different, counts = np.unique(values, return_counts=True)
    rows = max(1, _CELLS // len(different))
    parts: list[np.ndarray] = []
    for start in range(0, resamples, rows):
        drawn = random.multinomial(len(values), counts / len(values), size=min(rows, resamples - start))
        # Not a matrix product: its last bit may depend on the number of rows.
        parts.append((drawn * different).sum(axis=1) / len(values))
    return np.concatenate(parts)
