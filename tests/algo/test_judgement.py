"""Statistics of several answers to each prompt, against enumeration."""

from itertools import combinations, product

import numpy as np
import pytest

from megappo.algo import judgement
from megappo.algo.judgement import bootstrap_interval, majority_score, pass_at_k


def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_correct_answer() -> None:
    for n in range(1, 8):
        for c, k in product(range(n + 1), range(1, n + 1)):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            (found,) = pass_at_k(np.array([c]), np.array([n]), k)
            assert found == pytest.approx(expected, abs=1e-15), (n, c, k)


def test_pass_at_k_of_prompts_with_different_numbers_of_answers() -> None:
    # 1 - C(3,2)/C(4,2) = 1/2; 1 - C(1,2) = 1; two draws from one answer are not possible.
    found = pass_at_k(np.array([1, 2, 1]), np.array([4, 3, 1]), 2)
    np.testing.assert_allclose(found, [0.5, 1.0, np.nan], rtol=1e-15)


def test_pass_at_k_of_many_answers_neither_overflows_nor_loses_small_chances() -> None:
    # One correct of n: k / n, whatever the binomials are.
    found = pass_at_k(np.array([1, 1]), np.array([100_000, 5000]), 2500)
    np.testing.assert_allclose(found, [0.025, 0.5], rtol=1e-12)


@pytest.mark.parametrize(
    ("scores", "votes", "expected"),
    [
        ([1, 0, 0], ["a", "b", "b"], 0.0),
        ([1, 1, 0], ["a", "a", "b"], 1.0),
        ([1, 0], ["a", "b"], 0.5),  # a tie: either of them
        ([1, 0, 0, 1, 0.5], ["a", "b", "b", "a", "c"], 0.5),
        ([1, 0, 0, 0], ["a", "", "", ""], 1.0),  # what holds no answer has no vote
        ([0.5, 0], ["", ""], 0.25),  # nobody votes: any of them
        ([1, 0.5, 0], ["a", "a", "b"], 0.75),  # a reward that looks at more than the answer
    ],
)
def test_the_majority_has_the_score_of_the_commonest_answer(
    scores: list[float], votes: list[str], expected: float
) -> None:
    assert majority_score(scores, votes) == expected
    for order in ([*reversed(range(len(scores)))], [*range(1, len(scores)), 0]):
        assert majority_score([scores[i] for i in order], [votes[i] for i in order]) == expected


def enumerated_quantiles(values: list[float], confidence: float) -> np.ndarray:
    """Quantiles of the means of all resamples, each as likely as the others."""
    means = [np.mean(drawn) for drawn in product(values, repeat=len(values))]
    return np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0, 1.0, 1.0], [0.2, 0.9, 0.4, 0.0, 0.7]])
@pytest.mark.parametrize("confidence", [0.4, 0.8, 0.95])
def test_an_interval_is_that_of_all_resamples_there_are(values: list[float], confidence: float) -> None:
    found = bootstrap_interval(np.array(values), resamples=200_000, confidence=confidence, seed=0)
    # Means are multiples of 0.02 or lie further apart; Monte Carlo noise moves a quantile by one of them at most.
    np.testing.assert_allclose(found, enumerated_quantiles(values, confidence), atol=0.021)  # type: ignore[arg-type]


def test_an_interval_of_many_prompts_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).random(2000)
    low, high = bootstrap_interval(values, resamples=4000, confidence=0.95, seed=0) or (0.0, 0.0)
    half = 1.959964 * values.std() / np.sqrt(len(values))
    # A quantile of 4000 means has a standard error of about 2.7 % of the standard deviation.
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_an_interval_depends_on_numbers_and_seed_and_not_on_how_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).random(50)
    ask = {"resamples": 500, "confidence": 0.9}
    found = bootstrap_interval(values, seed=3, **ask)
    assert bootstrap_interval(values, seed=3, **ask) == found
    assert bootstrap_interval(values, seed=4, **ask) != found
    assert bootstrap_interval(values[::-1], seed=3, **ask) == found
    monkeypatch.setattr(judgement, "_CELLS", 170)  # three resamples at a time
    assert bootstrap_interval(values, seed=3, **ask) == found


def test_there_is_no_interval_of_nothing_and_none_without_resamples() -> None:
    assert bootstrap_interval(np.array([]), resamples=10, confidence=0.9, seed=0) is None
    assert bootstrap_interval(np.array([1.0, 0.0]), resamples=0, confidence=0.9, seed=0) is None
    assert bootstrap_interval(np.array([0.5]), resamples=10, confidence=0.9, seed=0) == (0.5, 0.5)
