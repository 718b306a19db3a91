"""verl 0.9.1 as an oracle where both define the same thing, and each deliberate difference shown.

Skipped unless verl can be imported, which is never a dependency: `make test-oracle` installs it apart and runs this.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megappo.algo.advantages import compute_sequence_advantages, estimator_of
from megappo.algo.advantages.base import SequenceInputs, TokenInputs
from megappo.algo.kl import compute_kl
from megappo.algo.losses import ValueLossBatch, compute_value_loss
from megappo.algo.masked import Moments, whiten
from megappo.algo.token_rewards import move_onto_tokens
from megappo.batch.fields import offsets_of
from megappo.config.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    ClipConfig,
    PolicyLossConfig,
    ValueLossConfig,
)
from tests.algo.loss_batches import LossCase, make_case, run_loss
from tests.algo.packed import tokens_of

verl = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed (make test-oracle)", exc_type=ImportError
)

LENGTHS = [3, 7, 1, 5, 12, 2, 4, 6]
GROUPS = np.array([1, 1, 1, 2, 2, 2, 3, 3])


def padded(values: np.ndarray, lengths: list[int]) -> Tensor:
    """Return packed values as [B, T]."""
    parts = np.split(values, np.cumsum(lengths)[:-1])
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(part) for part in parts], batch_first=True)


MASK = padded(np.ones(sum(LENGTHS)), LENGTHS)


class Step:
    """One step in both layouts: scores on the last token."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.scores = rng.random(8)
        self.tokens = tokens_of([[1] * length for length in LENGTHS])
        self.rewards = np.zeros(sum(LENGTHS))
        self.rewards[np.cumsum(LENGTHS) - 1] = self.scores
        self.values = rng.normal(size=sum(LENGTHS))

    def ours(self, name: str, **constants: Any) -> np.ndarray:
        algorithm = AlgorithmConfig(advantage=AdvantageConfig(name=name, **constants))
        entry = estimator_of(algorithm)
        sequence = None
        if entry.sequence_stage is not None:
            inputs = SequenceInputs(
                scores=self.scores,
                sequence_ids=np.arange(8),
                group_ids=GROUPS,
                response_tokens=np.array(LENGTHS),
                greedy_scores=np.full(8, 0.5),
            )
            sequence = compute_sequence_advantages(inputs, algorithm)
        inputs = TokenInputs(
            mask=np.ones(sum(LENGTHS), dtype=bool),
            offsets=offsets_of(LENGTHS),
            rewards=self.rewards,
            group_ids=GROUPS,
            sequence_advantages=sequence,
            values=self.values,
        )
        found = entry.token_stage(inputs, algorithm.advantage).advantages
        return whiten(found, Moments.of(found).whitening) if entry.declaration.whitens else found

    def theirs(self, function: str, **more: Any) -> np.ndarray:
        rewards = padded(self.rewards, LENGTHS)
        advantages, _ = getattr(verl, function)(token_level_rewards=rewards, response_mask=MASK, **more)
        return advantages[MASK.bool()].numpy()


class Gamma(dict[str, float]):
    """Stands for verl's configuration, which is read by attribute and by key."""

    gamma = 0.9


@pytest.mark.parametrize(
    ("name", "constants", "function", "more"),
    [
        ("grpo", {}, "compute_grpo_outcome_advantage", {"index": GROUPS}),
        (
            "grpo",
            {"normalize_by_std": False},
            "compute_grpo_outcome_advantage",
            {"index": GROUPS, "norm_adv_by_std_in_grpo": False},
        ),
        ("rloo", {}, "compute_rloo_outcome_advantage", {"index": GROUPS}),
        ("opo", {}, "compute_opo_outcome_advantage", {"index": GROUPS}),
        ("grpo_passk", {}, "compute_grpo_passk_outcome_advantage", {"index": GROUPS, "config": Gamma()}),
        (
            "reinforce_plus_plus_baseline",
            {},
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            {"index": GROUPS},
        ),
        (
            "reinforce_plus_plus",
            {"gamma": 0.9},
            "compute_reinforce_plus_plus_outcome_advantage",
            {"config": Gamma()},
        ),
        (
            "remax",
            {},
            "compute_remax_outcome_advantage",
            {"reward_baselines": torch.full((8,), 0.5, dtype=torch.float64)},
        ),
    ],
)
def test_estimators_agree(name: str, constants: dict[str, Any], function: str, more: dict[str, Any]) -> None:
    step = Step()
    # 1e-6: verl keeps some means in fp32.
    np.testing.assert_allclose(step.ours(name, **constants), step.theirs(function, **more), atol=1e-6)


def test_gae_agrees() -> None:
    step = Step()
    theirs, _ = verl.compute_gae_advantage_return(
        padded(step.rewards, LENGTHS), padded(step.values, LENGTHS), MASK, 0.9, 0.8
    )
    np.testing.assert_allclose(step.ours("gae", gamma=0.9, lam=0.8), theirs[MASK.bool()].numpy(), atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_agrees_in_value_and_gradient(estimator: str) -> None:
    d = torch.linspace(-30, 30, 121, dtype=torch.float64)
    sides = []
    for kl in (lambda x: compute_kl(x, estimator), lambda x: verl.kl_penalty(x, torch.zeros_like(x), estimator)):
        log_probs = d.clone().requires_grad_()
        value = kl(log_probs)
        (gradient,) = torch.autograd.grad(value.sum(), log_probs)
        sides.append((value.detach(), gradient))
    torch.testing.assert_close(sides[0], sides[1])


def verl_loss(name: str, case: LossCase, *, mode: str, **keys: Any) -> tuple[float, np.ndarray]:
    """Return verl's loss and gradient [N] of a case."""
    config = pytest.importorskip("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **keys
    )
    lengths = np.diff(case.offsets).tolist()
    log_probs = torch.tensor(case.log_probs, requires_grad=True)
    rows = torch.nn.utils.rnn.pad_sequence(list(log_probs.split(lengths)), batch_first=True)
    loss, _ = verl.get_policy_loss_fn(name)(
        old_log_prob=padded(case.old_log_probs, lengths),
        log_prob=rows,
        advantages=padded(case.advantages, lengths),
        response_mask=padded(case.loss_mask.astype(np.float64), lengths),
        loss_agg_mode=mode,
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.numpy()


def our_loss(case: LossCase, loss: PolicyLossConfig) -> tuple[float, np.ndarray]:
    output, gradient = run_loss(case, AlgorithmConfig(policy_loss=loss), without=["correction_weights", "entropy"])
    return output.loss.item(), gradient


CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
MODES = {
    "token-mean": Aggregation.token_mean,
    "seq-mean-token-mean": Aggregation.sequence_mean_token_mean,
    "seq-mean-token-sum": Aggregation.sequence_mean_token_sum,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("theirs", "name", "keys"),
    [("vanilla", "ppo_clip", {"clip_ratio_c": 3.0}), ("cispo", "cispo", {}), ("gpg", "gpg", {})],
)
def test_losses_agree(mode: str, theirs: str, name: str, keys: dict[str, Any]) -> None:
    case = make_case(1, LENGTHS)
    clip = ClipConfig(low=0.2, high=0.28, dual=keys.get("clip_ratio_c"))
    expected = verl_loss(theirs, case, mode=mode, **(CLIP | keys))
    loss, gradient = our_loss(case, PolicyLossConfig(name=name, clip=clip, aggregation=MODES[mode]))
    assert loss == pytest.approx(expected[0], abs=1e-6)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-6)


@pytest.mark.parametrize(("theirs", "name"), [("gspo", "gspo"), ("sapo", "sapo"), ("geo_mean", "gmpo")])
def test_sequence_mean_losses_agree(theirs: str, name: str) -> None:
    case = make_case(2, LENGTHS, uniform=True)
    # verl's geo_mean divides by all rows, so none may be empty.
    case.loss_mask[case.offsets[:-1]] = True
    expected = verl_loss(theirs, case, mode="seq-mean-token-mean", **CLIP)
    loss, gradient = our_loss(case, PolicyLossConfig(name=name, clip=ClipConfig(low=0.2, high=0.28)))
    assert loss == pytest.approx(expected[0], abs=1e-6)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-6)


def test_the_value_loss_agrees() -> None:
    rng = np.random.default_rng(0)
    new, old, returns = (rng.normal(size=sum(LENGTHS)) for _ in range(3))
    expected, fraction = verl.compute_value_loss(
        padded(new, LENGTHS), padded(returns, LENGTHS), padded(old, LENGTHS), MASK, 0.5
    )
    batch = ValueLossBatch(
        old_values=torch.tensor(old),
        returns=torch.tensor(returns),
        loss_mask=torch.ones(len(new), dtype=torch.bool),
        loss_weights=torch.full((len(new),), 1 / len(new), dtype=torch.float64),
    )
    output = compute_value_loss(torch.tensor(new), batch, AlgorithmConfig(value_loss=ValueLossConfig(clip=0.5)))
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    # verl counts where the clipped error is the larger one; ours counts every value out of the bound.
    assert output.metrics["critic/value_clip_fraction"].value > fraction.item()


def test_verl_lets_a_group_of_one_keep_its_score_and_we_give_it_zero() -> None:
    theirs, _ = verl.compute_grpo_outcome_advantage(torch.tensor([[0.7]]), torch.ones(1, 1), np.array([0]))
    assert theirs.item() == pytest.approx(0.7, abs=1e-5)
    inputs = SequenceInputs(
        scores=np.array([0.7]), sequence_ids=np.array([0]), group_ids=np.array([0]), response_tokens=np.array([1])
    )
    assert compute_sequence_advantages(inputs, AlgorithmConfig(advantage=AdvantageConfig(name="grpo"))) == [0]


def test_verl_raises_when_it_whitens_one_token_and_we_leave_it() -> None:
    with pytest.raises(ValueError, match="sum of the mask is one"):
        verl.compute_gae_advantage_return(torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 1.0, 1.0)
    assert Moments.of(np.ones(1)).whitening is None


def test_verl_loses_a_terminal_reward_behind_the_mask_and_we_move_it() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    _, returns = verl.compute_gae_advantage_return(rewards, torch.zeros(1, 3), mask, 0.5, 1.0)
    assert returns[0, :2].tolist() == [0, 0]
    assert move_onto_tokens(np.array([0.0, 0.0, 1.0]), tokens_of([[1, 1, 0]]), np.array([0, 3])).tolist() == [0, 1]


def test_verl_dual_clips_by_default_and_we_do_not() -> None:
    case = make_case(0, [1], spread=0.0)
    case.loss_mask[:] = True
    case.advantages[:] = -1.0
    case.log_probs[:] = case.old_log_probs + np.log(10)
    assert verl_loss("vanilla", case, mode="token-mean", **CLIP)[0] == pytest.approx(3)
    assert our_loss(case, PolicyLossConfig())[0] == pytest.approx(10)
