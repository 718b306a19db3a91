"""Advantage estimators that compare sequences, on hand-computed tables."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from megappo.algo.advantages import (
    ESTIMATORS,
    Estimator,
    compute_sequence_advantages,
    group_metrics,
    needs_sequence_advantages,
    needs_values,
    signal_by_group,
    whitens_tokens,
)
from megappo.algo.advantages.base import SequenceInputs
from megappo.algo.errors import AlgorithmInputError
from megappo.config.algorithm import AdvantageConfig, AlgorithmConfig
from megappo.observability.metrics import values


def inputs_of(
    scores: Sequence[float],
    groups: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    parts: Sequence[Mapping[str, float]] = (),
    greedy: Sequence[float] | None = None,
) -> SequenceInputs:
    return SequenceInputs(
        scores=np.array(scores, dtype=np.float64),
        sequence_ids=np.arange(100, 100 + len(scores)),
        group_ids=np.array(groups, dtype=np.int64),
        response_tokens=np.array(lengths if lengths is not None else [5] * len(scores), dtype=np.int64),
        parts=parts,
        greedy_scores=None if greedy is None else np.array(greedy, dtype=np.float64),
    )


def advantages(inputs: SequenceInputs, name: str, **constants: object) -> list[float]:
    config = AlgorithmConfig(advantage=AdvantageConfig(name=name, **constants))  # type: ignore[arg-type]
    return compute_sequence_advantages(inputs, config).tolist()


# Groups a = [1, 0, 0, 1], b = [1, 1], c = [0, 0, 1], interleaved.
SHUFFLED = inputs_of([1, 0, 1, 0, 0, 1, 0, 1, 1], [1, 3, 2, 1, 1, 2, 3, 1, 3])


def test_grpo_normalises_within_groups_of_unequal_size_whatever_the_order() -> None:
    a, c = 0.5 / (3**-0.5 + 1e-6), 1 / 3 / (3**-0.5 + 1e-6)
    assert advantages(SHUFFLED, "grpo") == pytest.approx([a, -c, 0, -a, -a, 0, -c, a, 2 * c], abs=1e-12)


def test_dr_grpo_leaves_the_division_out() -> None:
    expected = [0.5, -1 / 3, 0, -0.5, -0.5, 0, -1 / 3, 0.5, 2 / 3]
    assert advantages(SHUFFLED, "grpo", normalize_by_std=False) == pytest.approx(expected)


def test_grpo_treats_a_spread_of_rounding_error_as_none() -> None:
    assert advantages(inputs_of([0.3, 0.1 + 0.2], [1, 1]), "grpo") == [0, 0]
    assert advantages(inputs_of([1e-9, 3e-9], [1, 1]), "grpo") == pytest.approx([-1e-3, 1e-3], rel=2e-3)


def test_dr_grpo_and_rloo_keep_a_small_difference_on_a_large_offset() -> None:
    inputs = inputs_of([1e8, 1e8 + 1], [1, 1])
    assert advantages(inputs, "grpo", normalize_by_std=False) == [-0.5, 0.5]
    assert advantages(inputs, "rloo") == [-1, 1]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert advantages(inputs_of([3, 1, 2, 6], [1, 1, 1, 1]), "rloo") == pytest.approx([0, -8 / 3, -4 / 3, 4])


def test_reinforce_plus_plus_baseline_centres_within_the_group() -> None:
    assert advantages(inputs_of([3, 1, 8], [1, 1, 2]), "reinforce_plus_plus_baseline") == [1, -1, 0]


def test_opo_weighs_the_baseline_by_response_length() -> None:
    # (1 * 10 + 0 * 30) / 40 = 0.25
    assert advantages(inputs_of([1, 0], [1, 1], lengths=[10, 30]), "opo") == pytest.approx([0.75, -0.25])


def test_gpg_makes_up_for_groups_without_signal() -> None:
    inputs = inputs_of([1, 0, 1, 1, 0], [1, 1, 2, 2, 3])
    # 5 sequences, 2 of them in a group whose scores differ.
    assert advantages(inputs, "gpg") == pytest.approx([1.25, -1.25, 0, 0, 0])
    assert advantages(inputs, "gpg", alpha=2.0) == pytest.approx([1, -1, 0, 0, 0])


def test_gpg_without_any_signal_is_zero() -> None:
    assert advantages(inputs_of([1, 1], [1, 1]), "gpg") == [0, 0]


def test_grpo_passk_rewards_only_the_best_by_its_lead() -> None:
    inputs = inputs_of([1, 4, 2, 5, 5], [1, 1, 1, 2, 2])
    std = (7 / 3) ** 0.5  # of 1, 4, 2
    assert advantages(inputs, "grpo_passk") == pytest.approx([0, 2 / (std + 1e-6), 0, 0, 0])


def test_grpo_passk_gives_nothing_when_the_best_tie() -> None:
    assert advantages(inputs_of([1, 3, 3], [1, 1, 1]), "grpo_passk") == [0, 0, 0]


def test_maxrl_divides_by_the_mean_so_that_hard_prompts_count_more() -> None:
    inputs = inputs_of([1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    easy, hard = 0.25 / (0.75 + 1e-6), 0.75 / (0.25 + 1e-6)
    assert advantages(inputs, "maxrl") == pytest.approx(
        [hard, -hard / 3, -hard / 3, -hard / 3, easy, easy, easy, -3 * easy, 0, 0]
    )


def test_maxrl_refuses_a_negative_score_and_names_the_sequence() -> None:
    with pytest.raises(AlgorithmInputError, match=r"sequence 102: score .*negative"):
        advantages(inputs_of([1, 0, -0.5], [1, 1, 1]), "maxrl")


def test_gdpo_normalises_each_reward_part_then_whitens_over_sequences() -> None:
    parts = [{"a": 1, "b": 10}, {"a": 0, "b": 10}, {"a": 1, "b": 0}, {"a": 0, "b": 30}]
    inputs = inputs_of([0] * 4, [1, 1, 2, 2], parts=parts)
    a, b = 0.5 / (0.5**0.5 + 1e-6), 15 / (450**0.5 + 1e-6)
    raw = [a, -a, a - 2 * b, -a + 2 * b]
    keys = {"reward_keys": ["a", "b"], "weights": [1.0, 2.0]}
    assert advantages(inputs, "gdpo", whiten=False, **keys) == pytest.approx(raw)
    std = np.std(raw, ddof=1)
    assert advantages(inputs, "gdpo", **keys) == pytest.approx(list(np.array(raw) / std), rel=1e-6)


def test_gdpo_leaves_a_sequence_without_a_part_out_of_that_part() -> None:
    parts = [{"a": 1}, {"a": 0}, {"b": 3.0}]
    a = 0.5 / (0.5**0.5 + 1e-6)
    inputs = inputs_of([0] * 3, [1, 1, 1], parts=parts)
    assert advantages(inputs, "gdpo", reward_keys=["a"], whiten=False) == pytest.approx([a, -a, 0])


def test_gdpo_names_the_keys_it_saw_when_a_key_is_unknown() -> None:
    inputs = inputs_of([0, 0], [1, 1], parts=[{"format": 1.0}, {"correct": 0.0}])
    with pytest.raises(AlgorithmInputError, match=r"no part 'fromat' \(keys seen: correct, format\)"):
        advantages(inputs, "gdpo", reward_keys=["fromat"])


def test_remax_needs_the_greedy_scores() -> None:
    with pytest.raises(AlgorithmInputError, match="greedy_score"):
        advantages(inputs_of([1], [1]), "remax")


GROUP_ESTIMATORS = [
    name
    for name in ESTIMATORS.names()
    if isinstance(entry := ESTIMATORS.get(name), Estimator)
    and entry.declaration.compares_groups
    and entry.sequence_stage is not None
]


def constants_of(name: str) -> dict[str, object]:
    return {"reward_keys": ["part"]} if name == "gdpo" else {}


def with_parts(scores: Sequence[float], groups: Sequence[int], **more: object) -> SequenceInputs:
    return inputs_of(scores, groups, parts=[{"part": score} for score in scores], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_gets_zero(name: str) -> None:
    assert advantages(with_parts([0, 1, 0.5], [1, 2, 3]), name, **constants_of(name)) == [0, 0, 0]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_equal_scores_gets_exactly_zero(name: str) -> None:
    inputs = with_parts([0.1] * 3 + [0.7] * 7, [1] * 3 + [2] * 7, lengths=range(1, 11))
    assert advantages(inputs, name, **constants_of(name)) == [0] * 10


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_an_empty_sequence_gets_zero_and_takes_no_part_in_its_group(name: str) -> None:
    whole = with_parts([1, 0, 4, 2, 1, 9], [1, 1, 1, 2, 2, 2], lengths=[3, 2, 0, 1, 1, 0])
    without = with_parts([1, 0, 2, 1], [1, 1, 2, 2], lengths=[3, 2, 1, 1])
    found, expected = (advantages(inputs, name, **constants_of(name)) for inputs in (whole, without))
    assert found == [expected[0], expected[1], 0, expected[2], expected[3], 0]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_order_never_changes_a_bit(name: str) -> None:
    rng = np.random.default_rng(1)
    scores, groups = rng.random(40).tolist(), rng.integers(0, 9, 40).tolist()
    lengths, order = rng.integers(0, 9, 40).tolist(), rng.permutation(40).tolist()
    straight = advantages(with_parts(scores, groups, lengths=lengths), name, **constants_of(name))
    mixed = with_parts(
        *([column[row] for row in order] for column in (scores, groups)), lengths=[lengths[row] for row in order]
    )
    assert np.array(straight)[order].tolist() == advantages(mixed, name, **constants_of(name))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    found = advantages(with_parts([1, bad, 0], [1, 1, 1]), name, **constants_of(name))
    assert not np.isfinite(found).all()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_batch_of_empty_sequences_is_legal(name: str) -> None:
    assert advantages(with_parts([1, 2], [1, 1], lengths=[0, 0]), name, **constants_of(name)) == [0, 0]


def test_group_metrics_count_groups_their_size_and_those_without_signal() -> None:
    inputs = inputs_of([1, 0, 1, 1, 0, 7], [1, 1, 2, 2, 3, 3], lengths=[1, 1, 1, 1, 1, 0])
    found = values(group_metrics(inputs, AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))))
    assert found["rollout/groups"] == 3
    assert found["rollout/group_size/mean"] == pytest.approx(5 / 3)
    assert found["rollout/groups_without_signal"] == pytest.approx(2 / 3)


DIFFERENT = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
CANCELLING = [{"a": 1.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 1.0, "c": 1.0}]
SAME = [{"a": 1.0, "b": 0.0}] * 2
SIGNALS = [
    # name, scores, parts, greedy, whether the group teaches anything
    ("grpo", [1, 0], (), None, True),
    ("grpo", [1, 1], (), None, False),
    ("grpo", [0.1 + 0.2, 0.3], (), None, False),
    ("rloo", [0.1 + 0.2, 0.3], (), None, False),
    ("gpg", [0.1 + 0.2, 0.3], (), None, False),
    ("grpo", [np.nan, 1], (), None, True),
    # Its parts differ while the totals are equal, and the other way about: gdpo reads no total.
    ("gdpo", [1, 1], DIFFERENT, None, True),
    ("gdpo", [1, 0], SAME, None, False),
    ("gdpo", [1, 0], CANCELLING, None, False),
    # The best answer was no better than the second: passk gives 0 to all.
    ("grpo_passk", [1, 1, 0], (), None, False),
    ("grpo_passk", [1, 0.5, 0], (), None, True),
    ("grpo_passk", [0.1 + 0.2, 0.3, 0], (), None, False),
    # Equal scores are signal where the greedy answer has another one, and differing ones always are.
    ("remax", [1, 1], (), [0, 0], True),
    ("remax", [1, 1], (), [1, 1], False),
    ("remax", [1], (), [0], True),
    ("remax", [0.1 + 0.2], (), [0.3], False),
    ("remax", [1, 0], (), [1, 1], True),
    ("remax", [1], (), [np.nan], True),
]


@pytest.mark.parametrize(("name", "scores", "parts", "greedy", "signal"), SIGNALS)
def test_a_group_has_signal_where_the_estimator_gives_it_advantages(
    name: str, scores: list[float], parts: Sequence[Mapping[str, float]], greedy: list[float] | None, signal: bool
) -> None:
    inputs = inputs_of(scores, [7] * len(scores), parts=parts, greedy=greedy)
    constants: dict[str, object] = {}
    if name == "gdpo":
        weights = {"a": 2.0, "b": 1.0, "c": 1.0}
        keys = sorted(parts[0])
        constants = {"reward_keys": keys, "weights": [weights[key] for key in keys], "whiten": False}
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name=name, **constants))  # type: ignore[arg-type]
    assert signal_by_group(inputs, algorithm) == {7: signal}
    missing = values(group_metrics(inputs, algorithm))["rollout/groups_without_signal"]
    assert missing == 1 - signal
    given = np.array(advantages(inputs, name, **constants))
    if name == "remax":  # its sequence stage is the baseline alone
        given = given + np.array(scores)
    assert (np.abs(given).max() < 1e-12) == (not signal)


def test_gpg_counts_a_group_that_differs_by_rounding_error_as_one_without_signal() -> None:
    # 4 sequences, 2 of them in a group with signal.
    assert advantages(inputs_of([1, 0, 0.1 + 0.2, 0.3], [1, 1, 2, 2]), "gpg")[:2] == [1, -1]


def test_a_group_of_empty_sequences_has_no_signal() -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))
    inputs = inputs_of([1, 0, 1, 0], [1, 1, 2, 2], lengths=[0, 0, 3, 3])
    assert signal_by_group(inputs, algorithm) == {1: False, 2: True}
    assert signal_by_group(inputs_of([], []), algorithm) == {}


def test_declarations_say_what_each_estimator_needs() -> None:
    gae, grpo = AlgorithmConfig(), AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))
    assert needs_values(gae) and not needs_values(grpo)
    assert needs_sequence_advantages(grpo) and not needs_sequence_advantages(gae)
    assert whitens_tokens(gae) and not whitens_tokens(grpo)
    assert not whitens_tokens(AlgorithmConfig(advantage=AdvantageConfig(whiten=False)))


def test_an_estimator_from_outside_is_a_plain_function() -> None:
    assert advantages(inputs_of([1, 2], [1, 1]), "tests.algo.plugins:negative_scores") == [-1, -2]
