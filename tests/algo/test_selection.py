"""The token selection of clip_cov and kl_cov."""

import numpy as np
import pytest

from megappo.algo.masked import Moments
from megappo.algo.selection import (
    LossTokens,
    best_keys,
    close_selection,
    compute_selection_moments,
    count_selected,
    loss_tokens_of,
    open_selection,
    select_at_once,
    select_tokens,
)
from megappo.batch.stages import Experience
from megappo.config.algorithm import AlgorithmConfig, PolicyLossConfig
from tests.algo.packed import flatten, make_batch


def algorithm_of(name: str, *, seed: int = 0, **constants: float) -> AlgorithmConfig:
    return AlgorithmConfig(policy_loss=PolicyLossConfig(name=name, **constants), seed=seed)  # type: ignore[arg-type]


def random_tokens(seed: int, count: int) -> LossTokens:
    rng = np.random.default_rng(seed)
    return LossTokens(
        old_log_probs=-rng.exponential(size=count),
        advantages=rng.normal(size=count),
        sequence_ids=rng.integers(0, 20, count),
        positions=np.arange(count),
    )


def cut(tokens: LossTokens, rows: np.ndarray) -> LossTokens:
    return LossTokens(
        old_log_probs=tokens.old_log_probs[rows],
        advantages=tokens.advantages[rows],
        sequence_ids=tokens.sequence_ids[rows],
        positions=tokens.positions[rows],
    )


def test_kl_cov_selects_the_tokens_of_highest_covariance() -> None:
    tokens = random_tokens(0, 100)
    covariance = (tokens.old_log_probs - tokens.old_log_probs.mean()) * (tokens.advantages - tokens.advantages.mean())
    selected = select_at_once(tokens, algorithm_of("kl_cov", selected_fraction=0.07), whitening=None)
    assert set(np.flatnonzero(selected)) == set(np.argsort(covariance)[-7:])


def test_clip_cov_selects_at_random_among_tokens_with_covariance_in_bounds() -> None:
    tokens = random_tokens(0, 400)
    covariance = (tokens.old_log_probs - tokens.old_log_probs.mean()) * (tokens.advantages - tokens.advantages.mean())
    in_bounds = (covariance >= 0.1) & (covariance <= 0.8)
    bounds = {"covariance_low": 0.1, "covariance_high": 0.8, "selected_fraction": 0.05}
    first, second = (select_at_once(tokens, algorithm_of("clip_cov", seed=s, **bounds), whitening=None) for s in (0, 1))
    assert first.sum() == second.sum() == 20
    assert not (first & ~in_bounds).any()
    assert first.tolist() != second.tolist(), "the seed chooses"


def test_clip_cov_selects_nothing_without_a_candidate_and_no_more_than_there_are() -> None:
    tokens = random_tokens(0, 50)
    none = algorithm_of("clip_cov", covariance_low=1e3, covariance_high=1e4, selected_fraction=0.5)
    assert not select_at_once(tokens, none, whitening=None).any()
    every = algorithm_of("clip_cov", covariance_low=-1e4, covariance_high=1e4, selected_fraction=1.0)
    assert select_at_once(tokens, every, whitening=None).all()


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_at_least_one_token_is_selected(name: str) -> None:
    algorithm = algorithm_of(name, covariance_low=-1e4, covariance_high=1e4)
    assert select_at_once(random_tokens(0, 30), algorithm, whitening=None).sum() == 1


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_order_and_sharding_change_nothing(name: str) -> None:
    tokens = random_tokens(3, 300)
    algorithm = algorithm_of(name, covariance_low=0.0, covariance_high=2.0, selected_fraction=0.04)
    whitening = Moments.of(tokens.advantages).whitening
    whole = select_at_once(tokens, algorithm, whitening=whitening)
    assert whole.sum() == 12
    order = np.random.default_rng(0).permutation(300)
    rows = np.split(order, [10, 10, 170])
    shards = [cut(tokens, part) for part in rows]
    moments = [compute_selection_moments(shard) for shard in shards]
    selection, count = open_selection(moments, whitening), count_selected(moments, algorithm)
    keys = [best_keys(shard, selection, algorithm, count=count) for shard in shards]
    closed = close_selection(selection, keys, count=count)
    found = np.concatenate([select_tokens(shard, closed, algorithm) for shard in shards])
    assert found.tolist() == whole[order].tolist()


def test_a_step_without_loss_tokens_selects_nothing() -> None:
    tokens = random_tokens(0, 0)
    assert select_at_once(tokens, algorithm_of("kl_cov"), whitening=None).tolist() == []


def test_loss_tokens_of_an_experience_know_their_sequence_and_position() -> None:
    batch = make_batch([[0, 1, 1], [1, 1]], sequence_ids=[7, 9])
    experience = Experience(
        offsets=batch.offsets,
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        rollout_log_probs=batch.rollout_log_probs,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        loss_mask=flatten([[0, 1, 0], [1, 1]]).astype(bool),
        advantages=np.arange(5, dtype=np.float32),
        old_log_probs=-np.arange(5, dtype=np.float32),
    )
    tokens = loss_tokens_of(experience)
    assert tokens.sequence_ids.tolist() == [7, 9, 9] and tokens.positions.tolist() == [1, 0, 1]
    assert tokens.advantages.tolist() == [1, 3, 4] and tokens.old_log_probs.tolist() == [-1, -3, -4]
