"""Dynamic sampling: the invariants listed in megappo/algo/dynamic_sampling.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.algo.dynamic_sampling import SamplingOutcome, decide_sampling, prompts_to_draw
from megappo.config.algorithm import DynamicSamplingConfig, OnExhausted

GOOD, FLAT = True, False


def config(max_rounds: int, on_exhausted: str = "train_partial") -> DynamicSamplingConfig:
    return DynamicSamplingConfig(max_rounds=max_rounds, on_exhausted=OnExhausted(on_exhausted))


def test_missing_groups_are_drawn_again_while_rounds_are_left() -> None:
    groups = {1: GOOD, 2: FLAT, 3: GOOD, 4: FLAT}
    decision = decide_sampling(groups, target=4, rounds=1, config=config(2))
    assert decision.outcome is SamplingOutcome.refill and decision.refill == 2
    assert decision.kept == [1, 3] and decision.filtered == [2, 4]


@pytest.mark.parametrize("on_exhausted", ["train_partial", "carry_over", "stop"])
def test_out_of_rounds_the_configured_outcome_is_taken_with_its_counts(on_exhausted: str) -> None:
    # Three usable groups per round, eight needed, two rounds allowed.
    groups = {group: GOOD if group % 8 < 3 else FLAT for group in range(16)}
    decision = decide_sampling(groups, target=8, rounds=2, config=config(2, on_exhausted))
    assert decision.outcome.value == on_exhausted and decision.refill == 0
    assert decision.kept == [0, 1, 2, 8, 9, 10]
    assert decision.message == "6 of 16 groups carry signal, 10 filtered, 8 needed, round 2 of 2"


def test_constant_rewards_end_in_the_configured_outcome_too() -> None:
    decision = decide_sampling({1: FLAT, 2: FLAT}, target=2, rounds=3, config=config(3, "stop"))
    assert decision.outcome is SamplingOutcome.stop and decision.kept == []


def test_surplus_groups_are_carried_to_the_next_step() -> None:
    decision = decide_sampling({9: GOOD, 4: GOOD, 6: GOOD}, target=2, rounds=1, config=config(2))
    assert decision.outcome is SamplingOutcome.train
    assert decision.kept == [4, 6] and decision.surplus == [9]


@pytest.mark.parametrize(
    ("missing", "oversample", "draws"),
    [
        (4, 1.0, 4),
        (4, 1.5, 6),
        (3, 1.5, 5),
        (10, 1.1, 11),
        (1, 1.01, 2),
        (0, 3.0, 0),
        (7, 2.0, 14),
        (1000, 1.001, 1001),
    ],
)
def test_a_round_draws_the_factor_times_the_missing_groups_rounded_up(
    missing: int, oversample: float, draws: int
) -> None:
    config = DynamicSamplingConfig(max_rounds=2, oversample=oversample)
    assert prompts_to_draw(missing, config) == draws
    if missing:
        decision = decide_sampling({1: FLAT}, target=missing, rounds=1, config=config)
        assert decision.refill == draws and decision.outcome is SamplingOutcome.refill


@given(
    st.dictionaries(st.integers(0, 99), st.booleans(), max_size=12),
    st.integers(1, 8),
    st.integers(1, 4),
    st.randoms(),
)
def test_every_group_is_kept_carried_or_filtered_whatever_the_order(
    groups: dict[int, bool], target: int, rounds: int, random: object
) -> None:
    decision = decide_sampling(groups, target=target, rounds=rounds, config=config(3))
    assert sorted(decision.kept + decision.surplus + decision.filtered) == sorted(groups)
    assert decision.filtered == sorted(group for group, signal in groups.items() if not signal)
    assert len(decision.kept) <= target
    if decision.outcome is SamplingOutcome.refill:
        assert rounds < 3 and decision.refill == target - len(decision.kept) > 0
    shuffled = list(groups.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide_sampling(dict(shuffled), target=target, rounds=rounds, config=config(3)) == decision
