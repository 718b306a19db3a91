"""Estimators that look at tokens: gae, reinforce_plus_plus, remax, optimal_token_baseline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.algo.advantages import estimator_of
from megappo.algo.advantages.base import TokenAdvantages, TokenInputs
from megappo.algo.token_rewards import place_on_last_token
from megappo.batch.fields import offsets_of
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig
from tests.algo.packed import flatten, tokens_of


def run(
    name: str, masks: list[list[int]], *, gamma: float = 1.0, lam: float = 1.0, **fields: object
) -> TokenAdvantages:
    """Run an estimator on fields that are given on all tokens; return what it gives the response tokens."""
    mask = flatten(masks).astype(bool)
    given = {
        key: flatten(rows) if key != "sequence_advantages" else np.array(rows)  # type: ignore[arg-type]
        for key, rows in fields.items()
        if key != "groups"
    }
    groups = np.array(fields.get("groups", range(len(masks))))
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name=name, gamma=gamma, lam=lam))
    offsets = offsets_of([len(row) for row in masks])
    inputs = TokenInputs(mask=mask, offsets=offsets, group_ids=groups, **given)  # type: ignore[arg-type]
    found = estimator_of(algorithm).token_stage(inputs, algorithm.advantage)
    assert not found.advantages[~mask].any()
    returns = None if found.returns is None else found.returns[mask]
    return TokenAdvantages(advantages=found.advantages[mask], returns=returns)


def test_gae_on_a_hand_computed_table() -> None:
    # delta = [.9*.4-.5, .9*.2-.4, 1-.2] = [-.14, -.22, .8]; A = [-.14+.72*.356, -.22+.72*.8, .8]
    found = run("gae", [[1, 1, 1]], gamma=0.9, lam=0.8, rewards=[[0, 0, 1]], values=[[0.5, 0.4, 0.2]])
    assert found.advantages.tolist() == pytest.approx([0.11632, 0.356, 0.8])
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([0.61632, 0.756, 1.0])


def test_gae_with_gamma_zero_sees_the_terminal_reward_only_at_the_last_token() -> None:
    found = run("gae", [[1, 1, 1]], gamma=0.0, lam=0.8, rewards=[[0, 0, 1]], values=[[0.5, 0.4, 0.2]])
    assert found.advantages.tolist() == pytest.approx([-0.5, -0.4, 0.8])


def test_gae_jumps_over_observation_tokens_without_decay() -> None:
    together = run("gae", [[1, 1, 1]], gamma=0.9, lam=0.8, rewards=[[0, 0, 1]], values=[[0.5, 0.4, 0.2]])
    apart = run(
        "gae",
        [[0, 1, 0, 0, 1, 1, 0]],
        gamma=0.9,
        lam=0.8,
        rewards=[[0, 0, 0, 0, 0, 1, 0]],
        values=[[1e6, 0.5, np.nan, np.inf, 0.4, 0.2, 3.0]],
    )
    assert apart.advantages.tolist() == together.advantages.tolist()


def brute_force_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Sum of discounted deltas, straight from the definition."""
    steps = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < steps else 0) - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, steps)) for t in range(steps)]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_gae_equals_its_definition(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = [rng.normal(size=length).tolist() for length in lengths]
    values = [rng.normal(size=length).tolist() for length in lengths]
    found = run("gae", [[1] * length for length in lengths], gamma=gamma, lam=lam, rewards=rewards, values=values)
    expected = [brute_force_gae(r, v, gamma, lam) for r, v in zip(rewards, values)]
    np.testing.assert_allclose(found.advantages, flatten(expected), atol=1e-10)


def test_reinforce_plus_plus_discounts_over_response_tokens_only() -> None:
    found = run("reinforce_plus_plus", [[1, 0, 1, 1]], gamma=0.5, rewards=[[1, 0, 0, 4]])
    assert found.advantages.tolist() == [2, 2, 4]


def test_kl_on_masked_tokens_does_not_leak_into_returns() -> None:
    # 0.1 * KL of 0.5 on both response tokens, score 1 on the last.
    found = run("reinforce_plus_plus", [[1, 0, 0, 1]], rewards=[[-0.05, -0.2, -0.2, 0.95]])
    assert found.advantages.tolist() == pytest.approx([0.90, 0.95])


def test_remax_subtracts_the_greedy_score_from_the_rewards_to_come() -> None:
    found = run("remax", [[1, 1], [1]], rewards=[[0.5, 1], [2]], sequence_advantages=[-0.25, -2.0])
    assert found.advantages.tolist() == [1.25, 0.75, 0]


def brute_force_otb(
    rewards: list[list[float]], log_probs: list[list[float]], squares: list[list[float]], groups: list[int]
) -> list[list[float]]:
    out: list[list[float]] = []
    returns = [[sum(row[t:]) for t in range(len(row))] for row in rewards]
    weights = [
        [sum(1 - 2 * np.exp(lp[j]) + sq[j] for j in range(t + 1)) for t in range(len(lp))]
        for lp, sq in zip(log_probs, squares)
    ]
    for i, row in enumerate(returns):
        members = [j for j in range(len(returns)) if groups[j] == groups[i] and returns[j]]
        advantages = []
        for t in range(len(row)):
            there = [j for j in members if len(returns[j]) > t]
            baseline = 0.0
            if len(there) > 1:
                total = sum(weights[j][t] for j in there)
                baseline = sum(returns[j][t] * weights[j][t] for j in there) / total if total else 0.0
            advantages.append(row[t] - baseline if len(members) > 1 else 0.0)
        out.append(advantages)
    return out


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7), seed=st.integers(0, 2**32))
def test_optimal_token_baseline_equals_its_definition(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, log_probs, squares = (
        [make(length).tolist() for length in lengths]
        for make in (
            lambda n: rng.normal(size=n),
            lambda n: -rng.exponential(size=n) - 0.01,
            lambda n: 1 + rng.random(size=n),
        )
    )
    groups = rng.integers(0, 3, len(lengths)).tolist()
    found = run(
        "optimal_token_baseline",
        [[1] * length for length in lengths],
        rewards=rewards,
        old_log_probs=log_probs,
        sum_pi_squared=squares,
        groups=groups,
    )
    np.testing.assert_allclose(
        found.advantages, flatten(brute_force_otb(rewards, log_probs, squares, groups)), atol=1e-10
    )


def test_optimal_token_baseline_counts_steps_over_response_tokens() -> None:
    plain = run(
        "optimal_token_baseline",
        [[1, 1], [1]],
        rewards=[[0, 1], [0.5]],
        old_log_probs=[[-1, -2], [-3]],
        sum_pi_squared=[[0.2, 0.3], [0.4]],
        groups=[1, 1],
    )
    spread = run(
        "optimal_token_baseline",
        [[0, 1, 0, 1], [0, 0, 1]],
        rewards=[[0, 0, 0, 1], [0, 0, 0.5]],
        old_log_probs=[[9, -1, np.nan, -2], [9, 9, -3]],
        sum_pi_squared=[[9, 0.2, np.inf, 0.3], [9, 9, 0.4]],
        groups=[1, 1],
    )
    assert plain.advantages.tolist() == spread.advantages.tolist()
    # Only the first sequence has a second step, so its baseline there is 0.
    assert plain.advantages[1] == 1


def test_optimal_token_baseline_survives_certain_tokens() -> None:
    found = run(
        "optimal_token_baseline",
        [[1], [1]],
        rewards=[[1], [0]],
        old_log_probs=[[0], [0]],
        sum_pi_squared=[[1], [1]],
        groups=[1, 1],
    )
    assert found.advantages.tolist() == [1, 0]


def test_a_score_is_placed_on_the_last_response_token() -> None:
    tokens = tokens_of([[1, 1, 0], [0, 0], [0, 1, 1]])
    assert place_on_last_token(np.array([1.0, 10.0, 2.0]), tokens).tolist() == [0, 1, 0, 2]
