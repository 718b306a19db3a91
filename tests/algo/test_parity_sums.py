"""Difference of engine and trainer over a whole step: the same for any cut into shards, and equal to brute force."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algo.correction import correct
from megappo.algo.diagnostics import MismatchSums, PairMoments, SequenceGaps, compare_log_probs, merge_mismatch
from megappo.algo.experience import ExperienceTotals, merge_experience_metrics
from megappo.algo.masked import RUN_TOKENS, Moments
from megappo.batch.fields import select
from megappo.batch.stages import RolloutBatch
from megappo.config.algorithm import AlgorithmConfig, OldLogProbs
from megappo.observability.metrics import values
from tests.algo.packed import make_batch

AREA = "actor/rollout_log_prob_diff/"
NUM_SEQUENCES = 24


def random_batch(seed: int, *, longest: int = 30) -> tuple[RolloutBatch, np.ndarray, np.ndarray]:
    """Return sequences with gaps in their masks and unreported tokens, old log-probs [N] and who is current [B]."""
    random = np.random.default_rng(seed)
    masks = [random.integers(0, 2, random.integers(1, longest)).tolist() for _ in range(NUM_SEQUENCES)]
    masks[5] = [0, 0, 0]
    rollout = [(-random.exponential(size=len(mask))).tolist() for mask in masks]
    batch = make_batch(masks, rollout_log_probs=rollout)
    old = (batch.rollout_log_probs + 0.3 * random.normal(size=batch.num_tokens)).astype(np.float32)
    batch.rollout_log_probs[random.random(batch.num_tokens) < 0.05] = np.nan
    return batch, old, random.random(NUM_SEQUENCES) < 0.7


def totals_of(batch: RolloutBatch, old: np.ndarray, current: np.ndarray | None) -> ExperienceTotals:
    found = correct(batch, old, AlgorithmConfig(), current=current)
    return ExperienceTotals(
        loss_tokens=np.zeros(batch.num_sequences, np.int64),
        advantages=Moments(),
        whitens=False,
        mismatch=found.mismatch,
        gaps=found.gaps,
        metrics=found.metrics,
    )


def cut(
    batch: RolloutBatch, old: np.ndarray, current: np.ndarray, parts: Sequence[np.ndarray]
) -> list[ExperienceTotals]:
    """Compare each part by itself; it is given the old log-probs of its own tokens only."""
    by_sequence = [old[start:end] for start, end in zip(batch.offsets, batch.offsets[1:])]
    return [
        totals_of(
            select(batch, part),
            np.concatenate([np.zeros(0, np.float32), *(by_sequence[row] for row in part)]),
            current[part],
        )
        for part in parts
    ]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_shards=st.integers(1, 6))
def test_any_cut_and_order_of_shards_gives_the_brute_force_numbers(seed: int, num_shards: int) -> None:
    batch, old, current = random_batch(seed)
    random = np.random.default_rng(seed + 1)
    order = random.permutation(NUM_SEQUENCES)
    borders = np.sort(random.integers(0, NUM_SEQUENCES + 1, num_shards - 1))
    found = values(merge_experience_metrics(cut(batch, old, current, np.split(order, borders))))

    compared = batch.response_mask & np.repeat(current, batch.lengths) & ~np.isnan(batch.rollout_log_probs)
    ours, theirs = old[compared].astype(np.float64), batch.rollout_log_probs[compared].astype(np.float64)
    size = np.abs(ours - theirs)
    assert found[f"{AREA}mean"] == pytest.approx(size.mean(), rel=1e-12)
    assert found[f"{AREA}max"] == size.max()
    assert found[f"{AREA}compared_ratio"] == compared.sum() / batch.response_mask.sum()
    expected = np.corrcoef(np.exp(ours), np.exp(theirs))[0, 1]
    assert found["correction/probability_pearson_r"] == pytest.approx(expected, rel=1e-10)
    everything = batch.response_mask & ~np.isnan(batch.rollout_log_probs)
    gap = np.abs(np.exp(old[everything].astype(np.float64)) - np.exp(batch.rollout_log_probs[everything], dtype=float))
    assert found["correction/probability_diff/mean"] == pytest.approx(gap.mean(), rel=1e-10), "stale tokens count here"


def test_the_correlation_of_nearly_equal_certain_tokens_keeps_its_digits() -> None:
    # Probabilities within 1e-7 of 0.999: raw sums of squares would lose all digits of their spread of 1e-14.
    random = np.random.default_rng(0)
    rollout = np.log(0.999 + 1e-7 * random.normal(size=6000))
    old = rollout + 3e-8 * random.normal(size=6000)
    p, q = np.exp(rollout).astype(np.longdouble), np.exp(old).astype(np.longdouble)
    p, q = p - p.mean(), q - q.mean()
    expected = float((p * q).sum() / np.sqrt((p * p).sum() * (q * q).sum()))
    for borders in ([], [1], [7, 8, 3000], list(range(50, 6000, 50))):
        parts = zip(np.split(rollout, borders), np.split(old, borders))
        found = values(merge_mismatch(compare_log_probs(ours, theirs, None)[1] for ours, theirs in parts))
        assert found["correction/probability_pearson_r"] == pytest.approx(expected, rel=1e-7)


def test_runs_within_a_shard_do_not_show() -> None:
    batch = make_batch([[1] * (RUN_TOKENS // 2 + 1)] * 3)  # two do not fit into a run
    old = np.linspace(0, 3, batch.num_tokens, dtype=np.float32)
    totals = totals_of(batch, old, None)
    assert totals.gaps is not None
    third = len(old) // 3
    assert totals.gaps.tokens.tolist() == [third] * 3
    assert totals.gaps.largest.tolist() == [float(old[third - 1]), float(old[2 * third - 1]), 3.0]
    assert totals.gaps.total[1] == pytest.approx(old[third : 2 * third].astype(float).sum(), rel=1e-12)


def test_only_stale_sequences_leave_the_difference_absent_and_say_so() -> None:
    batch, old, _ = random_batch(3)
    found = values(merge_experience_metrics([totals_of(batch, old, np.zeros(NUM_SEQUENCES, bool))]))
    assert found[f"{AREA}compared_ratio"] == 0
    assert f"{AREA}mean" not in found and f"{AREA}max" not in found and "correction/probability_pearson_r" not in found
    assert found["correction/k3"] > 0, "what the correction weighs is over all tokens"


def test_a_difference_is_never_measured_between_the_rollout_and_itself() -> None:
    batch, old, _ = random_batch(4)
    batch.rollout_log_probs[:] = old
    found = correct(batch, old, AlgorithmConfig(old_log_probs=OldLogProbs.rollout))
    assert (found.gaps, found.metrics, found.mismatch) == (None, {}, MismatchSums())
    absent = correct(batch, None, AlgorithmConfig())
    assert (absent.gaps, absent.metrics) == (None, {})


def test_a_log_prob_that_is_not_finite_is_not_averaged_away() -> None:
    batch = make_batch([[1, 1], [1]], rollout_log_probs=[[-1, -1], [-1]])
    totals = totals_of(batch, np.array([-1, np.nan, -1.5], np.float32), None)
    assert totals.gaps is not None
    assert np.isnan(totals.gaps.largest[0]) and np.isnan(totals.gaps.total[0])
    assert totals.gaps.largest[1] == 0.5
    assert np.isnan(values(totals.metrics)[f"{AREA}max"])


def test_nothing_to_compare_merges_as_nothing() -> None:
    some = PairMoments.of(np.array([0.5, 0.25]), np.array([0.5, 0.125]))
    assert PairMoments().merge(some) == some.merge(PairMoments()) == some
    assert PairMoments().pearson_r is None
    assert PairMoments.of(np.ones(3), np.ones(3)).pearson_r is None, "no spread, no correlation"
    assert values(SequenceGaps.zeros(2).metrics(0)) == {}
