"""Estimators that look at tokens: gae, reinforce_plus_plus, remax, optimal_token_baseline."""

import numpy as np
import pytest
import torch
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


def softmax_rows(logits: np.ndarray, sampled: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs of the sampled tokens [n] and sums of squared probabilities [n] of logits [n, V]."""
    above = torch.as_tensor(logits, dtype=dtype) - torch.as_tensor(logits.max(axis=1)[:, None], dtype=dtype)
    total, squares = above.exp().sum(-1), (2 * above).exp().sum(-1)
    log_probs = above.gather(1, torch.as_tensor(sampled)[:, None])[:, 0] - total.log()
    return log_probs.double().numpy(), (squares / total.square()).double().numpy()


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7), seed=st.integers(0, 2**32))
def test_optimal_token_baseline_equals_its_definition(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = [rng.normal(size=length).tolist() for length in lengths]
    rows = [
        softmax_rows(2 * rng.normal(size=(length, 9)), rng.integers(0, 9, length), torch.float64) for length in lengths
    ]
    log_probs, squares = [row[0].tolist() for row in rows], [row[1].tolist() for row in rows]
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


@pytest.mark.parametrize("margin", [0.0, 6.0, 12.0, 20.0, 22.0])
def test_optimal_token_baseline_weighs_nearly_certain_tokens_as_float64_does(margin: float) -> None:
    # In fp32, 1 - 2 pi + sum pi^2 of a token of probability 1 - 1e-5 is rounding error of either sign: 1e-7 for 1e-10.
    rng, steps, vocabulary = np.random.default_rng(int(margin)), 8, 32_000
    logits = rng.normal(size=(2 * steps, vocabulary))
    sampled = rng.integers(0, vocabulary, 2 * steps)
    logits[np.arange(2 * steps), sampled] = margin * (1 + 0.1 * rng.random(2 * steps))
    rewards = [[0.0] * (steps - 1) + [1.0], [0.0] * steps]

    def baselines(dtype: torch.dtype) -> np.ndarray:
        log_probs, squares = softmax_rows(logits, sampled, dtype)
        found = run(
            "optimal_token_baseline",
            [[1] * steps] * 2,
            rewards=rewards,
            old_log_probs=np.split(log_probs, 2),
            sum_pi_squared=np.split(squares, 2),
            groups=[0, 0],
        )
        return 1.0 - found.advantages[:steps]

    exact, measured = baselines(torch.float64), baselines(torch.float32)
    # The returns are 1 and 0, so the baseline is the share of the first sequence in the weight.
    assert ((measured >= 0) & (measured <= 1)).all()
    odds = measured / (1 - measured) / (exact / (1 - exact))
    if margin <= 6.0:
        np.testing.assert_allclose(odds, 1.0, rtol=1e-3)
    else:
        assert ((odds > 0.49) & (odds < 2.05)).all(), odds


def test_optimal_token_baseline_takes_a_sum_that_is_not_finite_for_what_it_is() -> None:
    for square in (np.nan, np.inf):
        found = run(
            "optimal_token_baseline",
            [[1], [1]],
            rewards=[[1], [0]],
            old_log_probs=[[-1], [-1]],
            sum_pi_squared=[[square], [0.3]],
            groups=[1, 1],
        )
        assert not np.isfinite(found.advantages).any()


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
