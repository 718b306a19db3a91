"""Placing scores, moving stray rewards, over-long penalty, KL in reward."""

import numpy as np
import pytest

from megappo.algo.errors import AlgorithmInputError
from megappo.algo.token_rewards import (
    RewardTotals,
    compute_overlong_penalty,
    compute_token_rewards,
    move_onto_tokens,
)
from megappo.batch.fields import concat, select
from megappo.batch.stages import RolloutBatch, TokenField
from megappo.config.algorithm import AlgorithmConfig, KLConfig, KLInRewardConfig, OldLogProbs, OverlongConfig
from megappo.observability.metrics import values
from tests.algo.packed import flatten, make_batch, token_field, tokens_of


def run(
    batch: RolloutBatch,
    scores: list[float],
    algorithm: AlgorithmConfig,
    *,
    old: TokenField | None = None,
    ref: TokenField | None = None,
    kl_coef: float = 0.0,
) -> tuple[TokenField, RewardTotals]:
    return compute_token_rewards(
        batch,
        scores=np.array(scores, dtype=np.float64),
        truncated=np.zeros(batch.num_sequences, bool),
        old_log_probs=old,
        ref_log_probs=ref,
        algorithm=algorithm,
        kl_coef=kl_coef,
    )


def kl_in_reward(estimator: str = "k1", coef: float = 0.1) -> AlgorithmConfig:
    return AlgorithmConfig(kl=KLConfig(in_reward=KLInRewardConfig(estimator=estimator, coef=coef)))


def test_each_score_lands_on_the_last_response_token() -> None:
    batch = make_batch([[0, 1, 1, 0], [0, 1]])
    field, totals = run(batch, [0.1, 2.0], AlgorithmConfig())
    field.validate()
    assert field.values.tolist() == pytest.approx([0, 0, 0.1, 0, 0, 2])
    assert totals.returns.tolist() == [0.1, 2.0], "scores stay bitwise what they were"
    assert np.isnan(totals.kl).all()


def test_an_empty_response_gets_no_reward_and_is_counted() -> None:
    batch = make_batch([[0, 0, 0], [0, 1, 1]])
    field, totals = run(batch, [10.0, 1.0], AlgorithmConfig())
    assert field.values.tolist() == [0, 0, 0, 0, 0, 1]
    assert totals.returns.tolist() == [0, 1]
    assert values(totals.metrics)["rollout/empty_ratio"] == 0.5


def test_kl_is_subtracted_on_response_tokens_only() -> None:
    batch = make_batch([[1, 0, 0, 1], [0, 0, 0, 0]])
    old = token_field(batch, [[-1.0, np.nan, np.inf, -2.0], [np.nan] * 4])
    ref = token_field(batch, [[-1.5, 7.0, 1e6, -2.5], [np.nan] * 4])
    field, totals = run(batch, [1.0, 5.0], kl_in_reward(), old=old, ref=ref, kl_coef=0.1)
    assert field.values.tolist() == pytest.approx([-0.05, 0, 0, 0.95, 0, 0, 0, 0])
    assert totals.returns[0] == pytest.approx(0.9)
    assert totals.kl[0] == pytest.approx(0.5) and np.isnan(totals.kl[1])
    assert values(totals.metrics)["kl/in_reward/mean"] == pytest.approx(0.5)


def test_the_coefficient_of_the_step_counts_not_the_starting_one() -> None:
    batch = make_batch([[1]])
    old, ref = token_field(batch, [[-1.0]]), token_field(batch, [[-2.0]])
    _, totals = run(batch, [0.0], kl_in_reward(coef=0.1), old=old, ref=ref, kl_coef=0.3)
    assert totals.returns[0] == pytest.approx(-0.3)


def test_mean_kl_is_over_sequences_of_token_means() -> None:
    batch = make_batch([[1, 1, 1], [1]])
    old, ref = token_field(batch, [[-1, -1, -1], [-1]]), token_field(batch, [[-2, -2, -2], [-4]])
    _, totals = run(batch, [0.0, 0.0], kl_in_reward(), old=old, ref=ref, kl_coef=0.1)
    # Over tokens it would be (3 * 1 + 3) / 4.
    assert values(totals.metrics)["kl/in_reward/mean"] == pytest.approx(2.0)


@pytest.mark.parametrize(("estimator", "expected"), [("abs", 0.5), ("k2", 0.125), ("k3", np.exp(0.5) - 1.5)])
def test_other_kl_estimators_in_the_reward(estimator: str, expected: float) -> None:
    batch = make_batch([[1]])
    old, ref = token_field(batch, [[-2.0]]), token_field(batch, [[-1.5]])
    _, totals = run(batch, [0.0], kl_in_reward(estimator), old=old, ref=ref, kl_coef=1.0)
    assert totals.kl[0] == pytest.approx(expected)


def test_a_capped_k3_is_counted_and_an_infinite_difference_is_not_hidden_by_the_cap() -> None:
    batch = make_batch([[1, 1], [1, 1]])
    old = token_field(batch, [[-1, -50], [-1, -np.inf]])
    ref = token_field(batch, [[-1, -1], [-1, -1]])
    field, totals = run(batch, [0.0, 0.0], kl_in_reward("k3"), old=old, ref=ref, kl_coef=1.0)
    assert totals.kl[0] == 5, "capped at 10, mean of two tokens"
    assert values(totals.metrics)["kl/in_reward/capped_fraction"] == 0.5
    assert np.isfinite(field.values[:3]).all() and np.isnan(field.values[3])


def test_kl_in_reward_takes_the_engines_log_probs_where_they_stand_for_the_old_ones() -> None:
    batch = make_batch([[0, 1, 1]], rollout_log_probs=[[9, -2, -3]])
    ref = token_field(batch, [[np.nan, -2.5, -3]])
    algorithm = kl_in_reward()
    algorithm.old_log_probs = OldLogProbs.rollout
    field, totals = run(batch, [1.0], algorithm, ref=ref, kl_coef=0.1)
    assert field.values.tolist() == pytest.approx([0, -0.05, 1])
    assert totals.kl.tolist() == [0.25] and totals.returns[0] == pytest.approx(0.95)


def test_rewards_off_the_mask_move_to_the_last_response_token_before_them() -> None:
    masks = [[0, 1, 0, 1, 0], [0, 0, 1], [0, 0]]
    rewards = flatten([[1, 2, 4, 8, 16], [32, 0, 64], [5, np.nan]])
    moved = move_onto_tokens(rewards, tokens_of(masks), np.array([0, 5, 8, 10]))
    # 1 has no response token before it, so it goes to the first; those of the empty sequence are dropped.
    assert moved.tolist() == [1 + 2 + 4, 8 + 16, 32 + 64]


def test_a_reward_off_the_mask_that_is_not_finite_is_refused() -> None:
    with pytest.raises(AlgorithmInputError, match="sequence 1: rewards is inf at token 2, off the mask"):
        move_onto_tokens(flatten([[1], [1, 0, np.inf]]), tokens_of([[1], [1, 1, 0]]), np.array([0, 1, 4]))


def test_a_reward_on_the_mask_that_is_not_finite_is_not_hidden() -> None:
    moved = move_onto_tokens(flatten([[1, np.nan]]), tokens_of([[1, 1]]), np.array([0, 2]))
    assert np.isnan(moved[1])


def test_the_overlong_penalty_grows_over_the_buffer_and_is_bounded() -> None:
    lengths = np.array([0, 60, 80, 90, 100, 1000])
    penalty = compute_overlong_penalty(lengths, OverlongConfig(max_length=100, buffer=20, factor=0.5))
    assert penalty.tolist() == pytest.approx([0, 0, 0, -0.25, -0.5, -0.5])


def test_the_overlong_penalty_counts_response_tokens_and_joins_the_score() -> None:
    algorithm = AlgorithmConfig(overlong=OverlongConfig(max_length=4, buffer=2, factor=1.0))
    batch = make_batch([[0, 0, 1, 0, 1, 1], [1, 0, 1, 0, 0, 0]])
    field, totals = run(batch, [1.0, 1.0], algorithm)
    assert totals.returns.tolist() == [0.5, 1.0]
    assert field.values.tolist() == [0, 0, 0, 0, 0, 0.5, 0, 0, 1, 0, 0, 0]


def test_scores_are_bitwise_the_same_for_any_sharding() -> None:
    rng = np.random.default_rng(0)
    batch = make_batch([rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(12)])
    scores = rng.normal(size=12)
    algorithm = AlgorithmConfig(overlong=OverlongConfig(max_length=4, buffer=3))
    whole, totals = run(batch, scores.tolist(), algorithm)
    shards = [[3, 1, 0, 9], [2, 4, 5, 6, 7, 8], [10, 11]]
    parts = [run(select(batch, shard), scores[shard].tolist(), algorithm) for shard in shards]
    order = np.concatenate(shards)
    assert np.concatenate([part.returns for _, part in parts]).tobytes() == totals.returns[order].tobytes()
    assert concat([field for field, _ in parts]).values.tobytes() == select(whole, order).values.tobytes()
