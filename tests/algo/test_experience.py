"""From token rewards to an Experience: masks, order of the steps, sharding, whitening over the batch."""

import numpy as np
import pytest

from megappo.algo.advantages import ESTIMATORS, compute_sequence_advantages, needs_sequence_advantages
from megappo.algo.advantages.base import SequenceInputs
from megappo.algo.errors import AlgorithmInputError
from megappo.algo.experience import (
    ExperienceTotals,
    build_experience,
    compute_token_rewards,
    merge_experience_metrics,
    merge_whitening,
)
from megappo.algo.masked import whiten
from megappo.batch.fields import concat, select
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionWeightConfig,
    KLConfig,
    KLInRewardConfig,
    OldLogProbs,
    RejectConfig,
)
from megappo.observability.metrics import values
from tests.algo.packed import make_batch, token_field


def run(
    batch: RolloutBatch,
    scores: list[float],
    algorithm: AlgorithmConfig,
    *,
    truncated: list[bool] | None = None,
    fields: dict[str, TokenField] | None = None,
    sequence_advantages: np.ndarray | None = None,
) -> tuple[Experience, ExperienceTotals]:
    """Run both functions of a shard; `fields`: values, old_log_probs, ref_log_probs, sum_pi_squared."""
    given = {"values": None, "old_log_probs": None, "ref_log_probs": None} | (fields or {})
    cut = np.array(truncated if truncated is not None else [False] * batch.num_sequences)
    rewards, _ = compute_token_rewards(
        batch,
        scores=np.array(scores, dtype=np.float64),
        truncated=cut,
        old_log_probs=given["old_log_probs"],
        ref_log_probs=given["ref_log_probs"],
        algorithm=algorithm,
        kl_coef=algorithm.kl.in_reward.coef,
    )
    experience, totals = build_experience(
        batch,
        rewards=rewards,
        truncated=cut,
        sequence_advantages=sequence_advantages,
        algorithm=algorithm,
        **given,  # type: ignore[arg-type]
    )
    experience.validate()
    return experience, totals


def returns_only(**keys: object) -> AlgorithmConfig:
    """Advantages are the rewards to come: easy to compute by hand."""
    return AlgorithmConfig(advantage=AdvantageConfig(name="reinforce_plus_plus", whiten=False), **keys)  # type: ignore[arg-type]


def test_advantages_of_sequences_are_spread_over_their_response_tokens() -> None:
    batch = make_batch([[0, 1, 1], [1, 0, 1]])
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))
    experience, totals = run(batch, [1, 0], algorithm, sequence_advantages=np.array([0.5, -2.0]))
    assert experience.advantages.tolist() == [0, 0.5, 0.5, -2, 0, -2]
    assert experience.loss_mask.tolist() == batch.response_mask.tolist()
    assert experience.returns is None and experience.values is None and experience.old_log_probs is None
    assert totals.loss_tokens.tolist() == [2, 2]


def test_gae_returns_are_taken_before_whitening_and_advantages_stay_raw() -> None:
    batch = make_batch([[1, 1, 1, 0, 0]])
    for garbage in (3.0, 1e6, np.nan):
        fields = {"values": token_field(batch, [[0.5, 0.4, 0.2, garbage, garbage]])}
        algorithm = AlgorithmConfig(advantage=AdvantageConfig(gamma=0.9, lam=0.8))
        experience, totals = run(batch, [1.0], algorithm, fields=fields)
        assert experience.advantages.tolist() == pytest.approx([0.11632, 0.356, 0.8, 0, 0])
        assert experience.returns is not None
        assert experience.returns.tolist() == pytest.approx([0.61632, 0.756, 1.0, 0, 0])
        whitened = whiten(experience.advantages[:3], merge_whitening([totals]))
        assert whitened.mean() == pytest.approx(0, abs=1e-6) and whitened.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_truncated_samples_leave_the_loss_but_not_the_advantages() -> None:
    batch = make_batch([[1, 1], [1, 1, 1]])
    experience, totals = run(batch, [1, 2], returns_only(mask_truncated=True), truncated=[True, False])
    assert experience.loss_mask.tolist() == [False, False, True, True, True]
    assert experience.advantages.tolist() == [1, 1, 2, 2, 2]
    assert totals.loss_tokens.tolist() == [0, 3]
    kept, _ = run(batch, [1, 2], returns_only(), truncated=[True, False])
    assert kept.loss_mask.all()


def test_rejecting_the_last_token_does_not_lose_the_reward() -> None:
    batch = make_batch([[1, 1, 1]], rollout_log_probs=[[-1, -1, -4]])
    fields = {"old_log_probs": token_field(batch, [[-1, -1, -1]])}
    algorithm = returns_only(correction=CorrectionConfig(reject=[RejectConfig()]))
    experience, totals = run(batch, [1.0], algorithm, fields=fields)
    assert experience.loss_mask.tolist() == [True, True, False]
    assert experience.advantages.tolist() == [1, 1, 1]
    assert totals.loss_tokens.tolist() == [2], "rejected tokens leave every denominator"
    assert values(totals.metrics)["correction/kept_fraction"] == pytest.approx(2 / 3)


def test_correction_weights_are_kept_beside_the_loss_mask() -> None:
    batch = make_batch([[0, 1, 1, 1]], rollout_log_probs=[[9, -1, -4, -0.5]])
    fields = {"old_log_probs": token_field(batch, [[9, -1, -2, -0.5]])}
    algorithm = returns_only(correction=CorrectionConfig(weight=CorrectionWeightConfig(high=2.0)))
    experience, totals = run(batch, [1.0], algorithm, fields=fields)
    assert experience.correction_weights is not None
    assert experience.correction_weights.tolist() == [0, 1, 2, 1]
    found = values(merge_experience_metrics([totals]))
    assert found["correction/capped_fraction"] == pytest.approx(1 / 3)
    assert found["correction/weight/mean"] == pytest.approx(4 / 3) and found["correction/weight/max"] == 2
    assert found["correction/effective_sample_share"] == pytest.approx(16 / 6 / 3)


def test_missing_rollout_log_probs_are_an_error_only_where_they_are_needed() -> None:
    batch = make_batch([[1], [1, 1]], rollout_log_probs=[[-1], [-1, np.nan]], sequence_ids=[40, 41])
    fields = {"old_log_probs": token_field(batch, [[-1], [-1, -1]])}
    corrected = returns_only(correction=CorrectionConfig(weight=CorrectionWeightConfig()))
    with pytest.raises(AlgorithmInputError, match="sequence 41: rollout_log_probs is missing, rollout correction"):
        run(batch, [1, 1], corrected, fields=fields)
    with pytest.raises(AlgorithmInputError, match="sequence 41: rollout_log_probs is missing, old_log_probs=rollout"):
        run(batch, [1, 1], returns_only(old_log_probs=OldLogProbs.rollout))
    _, totals = run(batch, [1, 1], returns_only(), fields=fields)
    assert values(totals.metrics)["actor/rollout_log_prob_diff/max"] == 0


@pytest.mark.parametrize("where", ["old_log_probs", "rollout_log_probs"])
def test_an_infinite_log_prob_is_not_hidden_by_the_bounds_of_the_correction(where: str) -> None:
    infinite, finite = [[-1.0, -np.inf]], [[-1.0, -1.0]]
    batch = make_batch([[1, 1]], rollout_log_probs=infinite if where == "rollout_log_probs" else finite)
    old = token_field(batch, infinite if where == "old_log_probs" else finite)
    algorithm = returns_only(correction=CorrectionConfig(reject=[RejectConfig()]))
    experience, _ = run(batch, [1.0], algorithm, fields={"old_log_probs": old})
    assert experience.loss_mask[1] and experience.correction_weights is not None
    assert np.isnan(experience.correction_weights[1])


def test_old_log_probs_of_the_rollout_engine_are_taken_when_asked_for() -> None:
    batch = make_batch([[0, 1]], rollout_log_probs=[[5, -2]])
    experience, _ = run(batch, [1.0], returns_only(old_log_probs=OldLogProbs.rollout))
    assert experience.old_log_probs is not None and experience.old_log_probs.tolist() == [0, -2]


def random_step(seed: int) -> tuple[RolloutBatch, np.ndarray, dict[str, TokenField]]:
    rng = np.random.default_rng(seed)
    masks = [rng.integers(0, 2, rng.integers(1, 12)).tolist() for _ in range(16)]
    masks[3] = [0, 0]
    lengths = [len(mask) for mask in masks]
    rollout = [(-rng.exponential(size=length)).tolist() for length in lengths]
    batch = make_batch(masks, groups=(np.arange(16) // 4).tolist(), rollout_log_probs=rollout)

    def field(scale: float) -> TokenField:
        return token_field(batch, [(-scale * rng.exponential(size=length)).tolist() for length in lengths])

    fields = {name: field(1.0) for name in ("values", "old_log_probs", "ref_log_probs")}
    fields["sum_pi_squared"] = field(-0.5)
    return batch, rng.random(16), fields


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_sharding_changes_neither_experience_nor_whitening(name: str) -> None:
    batch, scores, fields = random_step(5)
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(name=name, reward_keys=["part"] if name == "gdpo" else []),
        kl=KLConfig(in_reward=KLInRewardConfig(coef=0.0 if name in ("gdpo", "maxrl") else 0.05)),
        correction=CorrectionConfig(weight=CorrectionWeightConfig(), reject=[RejectConfig(low=0.1, high=5.0)]),
    )
    # Groups stay whole, as optimal_token_baseline asks for.
    shards = [[4, 5, 6, 7, 0, 1, 2, 3], [12, 13, 14, 15], [8, 9, 10, 11]]

    def step(parts: list[list[int]]) -> tuple[list[Experience], list[ExperienceTotals]]:
        order = np.concatenate(parts)
        batches = [select(batch, part) for part in parts]
        cut = [{key: select(field, part) for key, field in fields.items()} for part in parts]
        rewards = [
            compute_token_rewards(
                piece,
                scores=scores[part],
                truncated=np.zeros(len(part), bool),
                old_log_probs=given["old_log_probs"],
                ref_log_probs=given["ref_log_probs"],
                algorithm=algorithm,
                kl_coef=algorithm.kl.in_reward.coef,
            )
            for piece, part, given in zip(batches, parts, cut)
        ]
        advantages: list[np.ndarray | None] = [None] * len(parts)
        if needs_sequence_advantages(algorithm):
            inputs = SequenceInputs(
                scores=np.concatenate([totals.returns for _, totals in rewards]),
                sequence_ids=batch.sequence_ids[order],
                group_ids=batch.group_ids[order],
                response_tokens=np.concatenate([np.add.reduceat(b.response_mask, b.offsets[:-1]) for b in batches]),
                parts=[{"part": float(scores[row])} for row in order],
                greedy_scores=np.ones(16),
            )
            whole = compute_sequence_advantages(inputs, algorithm)
            advantages = list(np.split(whole, np.cumsum([len(part) for part in parts])[:-1]))
        built = [
            build_experience(
                piece,
                rewards=reward,
                truncated=np.zeros(len(part), bool),
                sequence_advantages=advantage,
                algorithm=algorithm,
                **given,
            )
            for piece, part, given, (reward, _), advantage in zip(batches, parts, cut, rewards, advantages)
        ]
        return [experience for experience, _ in built], [totals for _, totals in built]

    (whole,), (totals,) = step([list(range(16))])
    pieces, piece_totals = step(shards)
    joined, expected = concat(pieces), select(whole, np.concatenate(shards))
    assert joined.loss_mask.tolist() == expected.loss_mask.tolist()
    np.testing.assert_allclose(joined.advantages, expected.advantages, atol=1e-6)
    np.testing.assert_array_equal(joined.correction_weights, expected.correction_weights)
    one, many = merge_whitening([totals]), merge_whitening(piece_totals)
    assert (one is None) == (many is None)
    if one is not None and many is not None:
        assert (one.mean, one.inverse_std) == pytest.approx((many.mean, many.inverse_std), rel=1e-9)
    assert values(merge_experience_metrics(piece_totals)) == pytest.approx(
        values(merge_experience_metrics([totals])), rel=1e-9
    )


@pytest.mark.parametrize("name", ESTIMATORS.names())
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e6])
def test_nothing_off_the_mask_is_read(name: str, garbage: float) -> None:
    batch, scores, fields = random_step(2)
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(name=name, reward_keys=["part"] if name == "gdpo" else []),
        kl=KLConfig(in_reward=KLInRewardConfig(coef=0.0 if name in ("gdpo", "maxrl") else 0.05, estimator="k3")),
        correction=CorrectionConfig(weight=CorrectionWeightConfig(), reject=[RejectConfig()]),
    )
    advantages = np.linspace(-1, 1, 16)
    clean, totals = run(batch, scores.tolist(), algorithm, fields=fields, sequence_advantages=advantages)
    for array in (batch.rollout_log_probs, *(field.values for field in fields.values())):
        array[~batch.response_mask] = garbage
    dirty, dirty_totals = run(batch, scores.tolist(), algorithm, fields=fields, sequence_advantages=advantages)
    for field in ("advantages", "loss_mask", "correction_weights"):
        assert getattr(clean, field).tobytes() == getattr(dirty, field).tobytes()
    assert not dirty.advantages[~batch.response_mask].any()
    assert values(totals.metrics) == values(dirty_totals.metrics)


def test_whitening_with_too_few_tokens_is_skipped_and_counted() -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="reinforce_plus_plus"))
    for masks, skipped in (([[1, 0], [0, 0]], 1.0), ([[1, 0], [1, 0]], 0.0)):
        _, totals = run(make_batch(masks), [2.0, 1.0], algorithm)
        assert (merge_whitening([totals]) is None) == bool(skipped)
        assert values(merge_experience_metrics([totals]))["actor/whitening_skipped"] == skipped
