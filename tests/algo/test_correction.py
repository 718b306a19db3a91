"""Importance weights, rejection and the metrics of the mismatch between rollout and training engine."""

import numpy as np
import pytest

from megappo.algo.correction import compute_kept, compute_weights
from megappo.algo.diagnostics import compare_log_probs, merge_mismatch
from megappo.config.algorithm import (
    CorrectionLevel,
    CorrectionMode,
    CorrectionWeightConfig,
    RejectConfig,
    RejectEstimator,
    RejectLevel,
)
from megappo.observability.metrics import values
from tests.algo.packed import tokens_of

OLD, ROLLOUT = np.array([-1.0, -2.0, -0.5]), np.array([-1.0, -4.0, -0.5])
THREE = tokens_of([[1, 1, 1]])


def weigh(d: np.ndarray, level: str, mode: str, low: float = 0.5, high: float = 2.0) -> tuple[list[float], list[bool]]:
    config = CorrectionWeightConfig(level=CorrectionLevel(level), mode=CorrectionMode(mode), low=low, high=high)
    weights, bounded = compute_weights(d, THREE, config)
    return weights.tolist(), bounded.tolist()


def test_token_weights_are_truncated_at_the_cap() -> None:
    # Raw weights 1, e^2 = 7.389, 1.
    assert weigh(ROLLOUT - OLD, "token", "truncate") == ([1, 2, 1], [False, True, False])
    assert weigh(ROLLOUT - OLD, "token", "truncate", high=10.0)[0] == pytest.approx([1, 7.389, 1], abs=1e-3)


def test_masked_weights_are_zero_outside_the_bounds() -> None:
    d = -np.log([0.4, 1.5, 2.5])
    assert weigh(d, "token", "mask")[0] == pytest.approx([0, 1.5, 0])


def test_a_sequence_weight_is_the_product_over_its_response_tokens() -> None:
    assert weigh(-np.log([2.0, 0.5, 1.5]), "sequence", "truncate")[0] == pytest.approx([1.5] * 3)
    assert weigh(-np.log([2.0, 2.0, 2.0]), "sequence", "mask")[0] == [0, 0, 0]


def test_weights_are_bounded_before_exp() -> None:
    assert weigh(np.array([-1e4, 1e4, 0.0]), "token", "truncate", high=np.inf)[0] == pytest.approx(
        [np.exp(20), np.exp(-20), 1]
    )


def kept(d: list[float], masks: list[list[int]], *rejections: tuple[str, str, float, float]) -> list[int]:
    configs = [
        RejectConfig(level=RejectLevel(level), estimator=RejectEstimator(estimator), low=low, high=high)
        for level, estimator, low, high in rejections
    ]
    return compute_kept(np.array(d), tokens_of(masks), configs).astype(int).tolist()


def test_tokens_with_a_ratio_out_of_bounds_are_rejected() -> None:
    d = -np.log([1.1, 0.2, 2.3, 1e-5, 1.3])
    assert kept(d.tolist(), [[1] * 5], ("token", "ratio", 0.5, 2.0)) == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("estimator", "low", "high", "expected"),
    [
        ("ratio", 0.6, 1.5, [0, 1, 1, 0]),
        ("k1", -0.1, 0.6, [0, 1, 1, 1]),
        ("k2", 0.0, 0.1, [0, 1, 1, 0]),
        ("k3", 0.0, 0.15, [0, 1, 1, 1]),
    ],
)
def test_bounds_are_in_the_units_of_the_estimator(estimator: str, low: float, high: float, expected: list[int]) -> None:
    # ratio 1.82, 1, 1.05, .58; k1 -.6, 0, -.05, .55; k2 .18, 0, .001, .151; k3 .22, 0, .001, .127
    assert kept([-0.6, 0, -0.05, 0.55], [[1] * 4], ("token", estimator, low, high)) == expected


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("sequence_sum", -0.1, 0.5, [1, 1, 0]),
        ("sequence_mean", -0.1, 0.3, [1, 1, 0]),
        ("sequence_max", -0.5, 0.5, [0, 0, 1]),
    ],
)
def test_sequence_levels_remove_whole_sequences(level: str, low: float, high: float, expected: list[int]) -> None:
    # k1 per token: first sequence .9, -.5 (sum .4, mean .2, maximum .9); second .4 + .2 = sum .6, mean .3.
    masks = [[1, 1], [0, 0], [1]]
    assert kept([0.9, -0.5, -0.2], masks, (level, "k1", low, high)) == expected


def test_rejections_do_not_see_what_others_removed() -> None:
    d = [0.9, 0.1]
    both = [("token", "k1", -0.5, 0.5), ("sequence_max", "k1", -0.5, 0.5)]
    assert kept(d, [[1, 1]], *both) == kept(d, [[1, 1]], *reversed(both)) == [0, 0]


def test_equal_bounds_keep_what_lies_on_them() -> None:
    assert kept([0.0, 1.0], [[1, 1]], ("token", "k1", 0.0, 0.0)) == [1, 0]


def test_metrics_say_how_far_the_engines_are_apart() -> None:
    rollout, old = np.log([0.5, 0.2]), np.log([0.25, 0.4])
    found = values(compare_log_probs(rollout, old, None)[0])
    assert found["correction/probability_diff/mean"] == pytest.approx(0.225)
    assert found["correction/probability_diff/max"] == pytest.approx(0.25)
    # ratios old / rollout: 0.5 and 2
    assert found["correction/k3"] == pytest.approx(((0.5 - 1 + np.log(2)) + (2 - 1 - np.log(2))) / 2)
    assert found["correction/chi2"] == pytest.approx((0.25 + 4) / 2 - 1)


def test_metrics_of_shards_merge_to_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(size=50)
    old, weights = rollout + 0.2 * rng.normal(size=50), rng.random(50)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 31), slice(31, 50)]
    found = values(merge_mismatch(compare_log_probs(rollout[cut], old[cut], weights[cut])[1] for cut in cuts))
    assert found["correction/probability_pearson_r"] == pytest.approx(np.corrcoef(np.exp(rollout), np.exp(old))[0, 1])
    assert found["correction/perplexity_ratio"] == pytest.approx(np.exp(-old.mean()) / np.exp(-rollout.mean()))
    assert found["correction/effective_sample_share"] == pytest.approx(
        weights.sum() ** 2 / np.square(weights).sum() / 50
    )


def test_metrics_of_nothing_are_absent() -> None:
    empty = np.zeros(0)
    found, sums = compare_log_probs(empty, empty, None)
    assert values(found) == {} and merge_mismatch([sums]) == {}
    equal = values(merge_mismatch([compare_log_probs(np.zeros(3), np.zeros(3), None)[1]]))
    assert equal == {"correction/perplexity_ratio": 1.0}, "no spread, no correlation; no weights, no sample size"
