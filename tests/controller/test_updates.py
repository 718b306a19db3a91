"""Updates of a whole step: several epochs and mini-batches, every loss and aggregation, any layout. One process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megappo.batch.fields import concat
from megappo.batch.refs import Ref
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import Experience
from megappo.config.algorithm import (
    AdvantageConfig,
    Aggregation,
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionWeightConfig,
    KLConfig,
    KLInLossConfig,
    PolicyLossConfig,
    RejectConfig,
    RejectEstimator,
)
from megappo.config.algorithm_declarations import LOSS_DECLARATIONS
from megappo.config.batching import BatchingConfig
from megappo.observability.metrics import Metrics
from tests.controller.test_loop import make_config, make_controller
from tests.fakes.one_process import FakeActor, previous_tokens

LR = 3.0
CLIP = 0.2
LENGTH = 7.0


def algorithm_of(loss: str, mode: Aggregation) -> AlgorithmConfig:
    """Return an algorithm with a loss mask of its own (truncated samples are out) and weights of the correction."""
    length = LENGTH if mode is Aggregation.token_sum_constant else None
    policy_loss = PolicyLossConfig(name=loss, aggregation=mode, constant_length=length)
    if LOSS_DECLARATIONS[loss].selects_tokens:
        policy_loss.selected_fraction = 0.3
    return AlgorithmConfig(advantage=AdvantageConfig(name="grpo"), policy_loss=policy_loss, mask_truncated=True)


def trained(algorithm: AlgorithmConfig, batching: BatchingConfig, tmp_path: Path, *, data: int) -> FakeActor:
    config = make_config(algorithm, steps=1, batching=batching)
    controller, _ = make_controller(config, tmp_path, data=data, lr=LR)
    controller.prepare()
    controller.fit()
    assert isinstance(controller.parts.actor, FakeActor)
    return controller.parts.actor


PAIRS = [
    (loss, mode)
    for loss, declared in LOSS_DECLARATIONS.items()
    for mode in Aggregation
    if not declared.fixed_aggregation or mode is declared.aggregation
]


@pytest.mark.parametrize(("loss", "mode"), PAIRS)
def test_data_ranks_and_micro_batches_change_no_weight(loss: str, mode: Aggregation, tmp_path: Path) -> None:
    algorithm = algorithm_of(loss, mode)
    algorithm.kl = KLConfig(in_loss=KLInLossConfig(estimator="k2", coef=0.1))
    algorithm.correction = CorrectionConfig(weight=CorrectionWeightConfig(high=0.9))
    batching = BatchingConfig(prompts_per_step=4, samples_per_prompt=4, ppo_epochs=2, mini_batch_prompts=2)
    one = trained(algorithm, batching, tmp_path, data=1)
    other = trained(algorithm, replace(batching, micro_batch_tokens=14), tmp_path, data=4)
    moved = (one.table - one.reference).abs().max()
    assert moved > 1e-3
    # Sums of fp32 gradients in another order, over four optimizer steps.
    assert (one.table - other.table).abs().max() <= 1e-5 * moved


Update = tuple[list[Experience], list[UpdateRequest]]
"""What an update was asked for."""


def plain_sgd(start: torch.Tensor, update: Update, mode: Aggregation, *, epochs: int) -> torch.Tensor:
    """Return the table after the same update, written plainly: for each epoch and mini-batch one step, whose loss is a
    mean over all of the mini-batch's sequences, wherever they are."""
    experience, requests = update
    batch, table = concat(experience), start.double().requires_grad_()
    previous, tokens = previous_tokens(batch), torch.from_numpy(batch.tokens.astype(np.int64))
    starts = dict(zip(batch.sequence_ids.tolist(), zip(batch.offsets[:-1], batch.offsets[1:])))
    groups = dict(zip(batch.sequence_ids.tolist(), batch.group_ids.tolist()))
    assert batch.old_log_probs is not None
    old, advantages = torch.from_numpy(batch.old_log_probs).double(), torch.from_numpy(batch.advantages).double()
    for _ in range(epochs):
        for index in range(len(requests[0].mini_batches)):
            ratio = torch.exp(torch.log_softmax(table, dim=-1)[previous, tokens] - old)
            losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
            per_sequence: dict[int, torch.Tensor] = {}
            for request in requests:
                for sequence_id in (i for ids in request.mini_batches[index].micro_batches for i in ids):
                    first, last = starts[sequence_id]
                    kept = losses[first:last][torch.from_numpy(batch.loss_mask[first:last])]
                    if len(kept):
                        per_sequence[sequence_id] = kept
            loss = aggregate(per_sequence, groups, mode)
            (gradient,) = torch.autograd.grad(loss, table)
            table = (table.detach() - LR * gradient).requires_grad_()
    return table.detach()


def aggregate(per_sequence: dict[int, torch.Tensor], groups: dict[int, int], mode: Aggregation) -> torch.Tensor:
    rows = list(per_sequence.values())
    if mode is Aggregation.token_mean:
        return torch.cat(rows).mean()
    if mode is Aggregation.sequence_mean_token_mean:
        return torch.stack([row.mean() for row in rows]).mean()
    if mode is Aggregation.prompt_mean:
        prompts = sorted({groups[sequence_id] for sequence_id in per_sequence})
        of_prompt = [torch.cat([row for i, row in per_sequence.items() if groups[i] == prompt]) for prompt in prompts]
        return torch.stack([row.mean() for row in of_prompt]).mean()
    per_token = LENGTH if mode is Aggregation.token_sum_constant else 1.0
    return torch.stack([row.sum() for row in rows]).mean() / per_token


@pytest.mark.parametrize("data", [1, 4])
@pytest.mark.parametrize("mode", list(Aggregation))
def test_every_optimizer_step_has_the_denominators_of_its_own_mini_batch(
    mode: Aggregation, data: int, tmp_path: Path
) -> None:
    batching = BatchingConfig(
        prompts_per_step=4, samples_per_prompt=3, ppo_epochs=3, mini_batch_prompts=2, micro_batch_tokens=14
    )
    config = make_config(algorithm_of("ppo_clip", mode), steps=1, batching=batching)
    controller, _ = make_controller(config, tmp_path, data=data, lr=LR)
    actor = controller.parts.actor
    assert isinstance(actor, FakeActor)
    asked: list[Update] = []
    update = actor.update

    def keep(experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        asked.append((list(experience), list(requests)))  # type: ignore[arg-type]  # in one process a Ref is the object
        return update(experience, requests)

    actor.update = keep  # type: ignore[method-assign]
    controller.prepare()
    controller.fit()
    expected = plain_sgd(actor.reference, asked[0], mode, epochs=3)
    assert (actor.table - actor.reference).abs().max() > 1e-2
    # fp32 against float64 over six optimizer steps.
    torch.testing.assert_close(actor.table.detach().double(), expected, atol=1e-5, rtol=1e-5)


def test_a_step_whose_tokens_are_all_rejected_moves_nothing_and_says_so(tmp_path: Path) -> None:
    algorithm = algorithm_of("ppo_clip", Aggregation.token_mean)
    # Both engines agree to within rounding, and this keeps only tokens on which they don't.
    algorithm.correction = CorrectionConfig(reject=[RejectConfig(estimator=RejectEstimator.k1, low=5.0, high=6.0)])
    batching = BatchingConfig(prompts_per_step=4, samples_per_prompt=3, mini_batch_prompts=2)
    controller, recorder = make_controller(make_config(algorithm, steps=1, batching=batching), tmp_path, lr=LR)
    actor = controller.parts.actor
    assert isinstance(actor, FakeActor)
    controller.prepare()
    controller.fit()
    assert torch.equal(actor.table, actor.reference)
    (step,) = recorder.steps
    assert step["schedule/mini_batches_without_tokens"] == 2 and step["actor/loss_token_ratio"] == 0
    assert "actor/policy_loss" not in step and "perf/tflops_per_device/actor_update" not in step
