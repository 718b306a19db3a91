"""Tokens between the turns of a rollout program change nothing: for the sampled tokens every number is what it is when
they are taken out. So the last sampled token has the score, GAE and discounts count sampled tokens, and lengths,
whitening, KL, rejection and truncation see no others."""

from typing import Any

import numpy as np
import pytest

from megappo.algo.advantages import compute_sequence_advantages, needs_sequence_advantages
from megappo.algo.advantages.base import SequenceInputs
from megappo.algo.experience import (
    build_experience,
    compute_token_rewards,
    merge_experience_metrics,
    merge_whitening,
)
from megappo.algo.masked import whiten
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionWeightConfig,
    OverlongConfig,
    RejectConfig,
)
from megappo.observability.metrics import values
from tests.algo.packed import make_batch
from tests.algo.presets import PRESETS, preset_of

MASKS = [[0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1], [0, 1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 1, 0, 0]]
GROUPS = [0, 0, 1, 1]
SCORES = np.array([1.0, 0.25, 3.0, 2.0])
TRUNCATED = np.array([False, True, False, True])


def algorithm_of(preset: str) -> AlgorithmConfig:
    """The preset with everything switched on that looks at lengths or at differences of log-probs."""
    algorithm = preset_of(preset)
    algorithm.overlong = OverlongConfig(max_length=6, buffer=4, factor=0.5)
    algorithm.mask_truncated = True
    algorithm.kl.in_reward.coef = 0.1
    algorithm.correction = CorrectionConfig(
        weight=CorrectionWeightConfig(level=CorrectionLevel.sequence), reject=[RejectConfig(low=0.8, high=1.2)]
    )
    return algorithm


class Case:
    """Sequences with tokens off the mask behind their first sampled one, or the same without those."""

    def __init__(self, *, with_observations: bool) -> None:
        kept = [
            [value for place, value in enumerate(mask) if with_observations or value or not any(mask[:place])]
            for mask in MASKS
        ]
        self.batch = make_batch(kept, groups=GROUPS, rollout_log_probs=self._numbers(kept, 1))
        self.fields = {name: self._field(kept, seed) for seed, name in enumerate(FIELDS, start=2)}

    def _numbers(self, masks: list[list[int]], seed: int) -> list[list[float]]:
        """The same numbers at sampled tokens, and none elsewhere."""
        numbers = np.random.default_rng(seed)
        return [[float(-0.3 * numbers.random()) if sampled else np.nan for sampled in mask] for mask in masks]

    def _field(self, masks: list[list[int]], seed: int) -> TokenField:
        flat = np.array([value for row in self._numbers(masks, seed) for value in row], dtype=np.float32)
        return TokenField(offsets=self.batch.offsets, values=flat, sequence_ids=self.batch.sequence_ids)


FIELDS = ("values", "old_log_probs", "ref_log_probs", "sum_pi_squared")


def sequence_stage(batch: RolloutBatch, returns: np.ndarray, algorithm: AlgorithmConfig) -> np.ndarray | None:
    if not needs_sequence_advantages(algorithm):
        return None
    sampled = np.add.reduceat(batch.response_mask.astype(np.int64), batch.offsets[:-1])
    inputs = SequenceInputs(
        scores=returns,
        sequence_ids=batch.sequence_ids,
        group_ids=batch.group_ids,
        response_tokens=sampled,
        parts=[{"correct": float(score)} for score in SCORES],
        greedy_scores=np.array([0.5, 0.5, 0.0, 0.0]),
    )
    return compute_sequence_advantages(inputs, algorithm)


def results(case: Case, algorithm: AlgorithmConfig) -> tuple[Experience, dict[str, Any], np.ndarray]:
    """Return the experience, all per-sequence numbers and metrics, and the whitened advantages."""
    rewards, totals = compute_token_rewards(
        case.batch,
        scores=SCORES,
        truncated=TRUNCATED,
        old_log_probs=case.fields["old_log_probs"],
        ref_log_probs=case.fields["ref_log_probs"],
        algorithm=algorithm,
        kl_coef=0.1,
    )
    experience, found = build_experience(
        case.batch,
        rewards=rewards,
        truncated=TRUNCATED,
        sequence_advantages=sequence_stage(case.batch, totals.returns, algorithm),
        algorithm=algorithm,
        **case.fields,
    )
    numbers = {
        "returns": totals.returns,
        "kl": totals.kl,
        "loss_tokens": found.loss_tokens,
        **values(totals.metrics),
        **values(merge_experience_metrics([found])),
    }
    return experience, numbers, whiten(experience.advantages[experience.loss_mask], merge_whitening([found]))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_sampled_tokens_what_it_gives_them_without_the_others(preset: str) -> None:
    algorithm = algorithm_of(preset)
    apart, numbers, whitened = results(Case(with_observations=True), algorithm)
    together, expected, whitened_together = results(Case(with_observations=False), algorithm)
    assert apart.num_tokens > together.num_tokens
    for name in ("advantages", "returns", "loss_mask", "correction_weights", "old_log_probs"):
        found, wanted = getattr(apart, name), getattr(together, name)
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found[apart.response_mask].tolist() == wanted[together.response_mask].tolist(), name
            assert name == "old_log_probs" or not found[~apart.response_mask].any(), name
    assert whitened.tolist() == whitened_together.tolist()
    assert numbers.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(numbers[name], value, rtol=1e-12, err_msg=name)
    assert expected["loss_tokens"].sum() > 0


def test_the_score_stands_on_the_last_sampled_token_and_lengths_count_those() -> None:
    case, algorithm = (
        Case(with_observations=True),
        AlgorithmConfig(overlong=OverlongConfig(max_length=6, buffer=4, factor=0.5)),
    )
    rewards, totals = compute_token_rewards(
        case.batch,
        scores=SCORES,
        truncated=TRUNCATED,
        old_log_probs=None,
        ref_log_probs=None,
        algorithm=algorithm,
        kl_coef=0.0,
    )
    # 6, 3, 4 and 3 sampled tokens: -.5 * (n - 2) / 4
    expected = SCORES - np.array([0.5, 0.125, 0.25, 0.125])
    np.testing.assert_allclose(totals.returns, expected)
    assert np.flatnonzero(rewards.values).tolist() == [11, 15, 23, 30]
