"""Loss weights per token, on hand-computed tables."""

import numpy as np
import pytest

from megappo.algo.aggregation import compute_loss_weights
from megappo.config.algorithm import Aggregation

# Sequences of 4, 1, 0 and 5 loss tokens; the first two answer one prompt.
TOKENS, GROUPS = np.array([4, 1, 0, 5]), np.array([8, 8, 8, 3])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Aggregation.token_mean, [1 / 10, 1 / 10, 0, 1 / 10]),
        (Aggregation.sequence_mean_token_mean, [1 / 12, 1 / 3, 0, 1 / 15]),
        (Aggregation.sequence_mean_token_sum, [1 / 3, 1 / 3, 0, 1 / 3]),
        (Aggregation.token_sum_constant, [1 / 300, 1 / 300, 0, 1 / 300]),
        (Aggregation.prompt_mean, [1 / 10, 1 / 10, 0, 1 / 10]),
    ],
)
def test_weights_follow_the_counts_of_the_whole_mini_batch(mode: Aggregation, expected: list[float]) -> None:
    weights = compute_loss_weights(TOKENS, GROUPS, mode=mode, constant_length=100)
    assert weights.tolist() == pytest.approx(expected)


def test_prompts_weigh_alike_whatever_their_number_of_tokens() -> None:
    weights = compute_loss_weights(
        np.array([3, 1, 6]), np.array([1, 1, 2]), mode=Aggregation.prompt_mean, constant_length=None
    )
    assert weights.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 12])
    assert (weights * [3, 1, 6]).sum() == pytest.approx(1)


@pytest.mark.parametrize("mode", list(Aggregation))
def test_a_mini_batch_without_loss_tokens_has_no_weight(mode: Aggregation) -> None:
    weights = compute_loss_weights(np.zeros(3, np.int64), np.arange(3), mode=mode, constant_length=10)
    assert weights.tolist() == [0, 0, 0]


def test_token_mean_is_not_the_mean_of_micro_batch_means() -> None:
    # 4 tokens of loss 1 and 1 token of loss 5: 9 / 5, not (1 + 5) / 2.
    weights = compute_loss_weights(
        np.array([4, 1]), np.array([1, 2]), mode=Aggregation.token_mean, constant_length=None
    )
    assert 4 * weights[0] * 1 + weights[1] * 5 == pytest.approx(1.8)


def test_a_constant_length_does_not_depend_on_the_longest_response() -> None:
    short = compute_loss_weights(
        np.array([4, 2]), np.array([1, 2]), mode=Aggregation.token_sum_constant, constant_length=100
    )
    beside_long = compute_loss_weights(
        np.array([4, 900]), np.array([1, 2]), mode=Aggregation.token_sum_constant, constant_length=100
    )
    assert short[0] == beside_long[0] == pytest.approx(1 / 200)
