"""The supervised task over a bigram policy: loss and gradient against a brute force, on any layout."""

import numpy as np
import pytest
import torch

from megappo.balance.workload import TOKENS
from megappo.batch.fields import offsets_of
from megappo.batch.stages import RolloutBatch
from megappo.config.algorithm import AlgorithmConfig, PolicyLossConfig
from megappo.config.batching import BatchingConfig
from megappo.controller.sft import SftTask
from megappo.observability.metric_catalogue import undocumented
from megappo.observability.metrics import values
from tests.fakes.bigram_rollout import as_ref
from tests.fakes.one_process import FakeActor

VOCABULARY = 6
LR = 0.7


def rows_of(count: int, seed: int) -> RolloutBatch:
    """Rows of random tokens; the mask has holes, as that of a conversation has."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, count)
    tokens = int(lengths.sum())
    mask = random.random(tokens) < 0.6
    offsets = offsets_of(lengths)
    mask[offsets[:-1]] = False
    mask[offsets[1:] - 1] = True
    ids = np.arange(count, dtype=np.int64)
    return RolloutBatch(
        offsets=offsets,
        tokens=random.integers(0, VOCABULARY, tokens).astype(np.int32),
        response_mask=mask,
        rollout_log_probs=np.full(tokens, np.nan, np.float32),
        sequence_ids=ids,
        group_ids=ids,
    )


def make_task(actor: FakeActor, *, micro_batch_tokens: int = 4096, balance: bool = True) -> SftTask:
    batching = BatchingConfig(micro_batch_tokens=micro_batch_tokens, balance=balance)
    held_out = rows_of(5, seed=1)
    return SftTask(rows_of(12, seed=0), held_out, actor=actor, put=as_ref, batching=batching, workload=TOKENS)


def make_actor(*, data: int = 1) -> FakeActor:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    gpg = AlgorithmConfig(policy_loss=PolicyLossConfig(name="gpg"))
    return FakeActor(table, data=data, lr=LR, algorithm=gpg)


def cross_entropy(table: torch.Tensor, batch: RolloutBatch, rows: list[int]) -> torch.Tensor:
    """Mean over the tokens on the mask of these rows, one by one."""
    terms = []
    for row in rows:
        for token in range(int(batch.offsets[row]) + 1, int(batch.offsets[row + 1])):
            if batch.response_mask[token]:
                logits = table[int(batch.tokens[token - 1])]
                terms.append(torch.logsumexp(logits, 0) - logits[int(batch.tokens[token])])
    return torch.stack(terms).mean()


ROWS = [0, 2, 3, 7, 8, 11]


@pytest.mark.parametrize(
    ("data", "micro_batch_tokens", "balance"),
    [(1, 4096, True), (1, 9, True), (2, 9, True), (4, 9, False), (8, 4096, True)],
)
def test_loss_and_step_are_those_of_the_mean_over_the_trained_tokens_on_any_layout(
    data: int, micro_batch_tokens: int, balance: bool
) -> None:
    actor = make_actor(data=data)
    table = actor.table.detach().clone().double().requires_grad_()
    expected = cross_entropy(table, rows_of(12, seed=0), ROWS)
    (gradient,) = torch.autograd.grad(expected, table)
    metrics = make_task(actor, micro_batch_tokens=micro_batch_tokens, balance=balance).update(np.array(ROWS))
    numbers = values(metrics)
    # Sums of some 30 terms in fp32, and an fp32 step.
    assert numbers["sft/loss"] == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(actor.table.detach().double(), (table - LR * gradient).detach(), atol=1e-6)
    assert not undocumented(numbers)


@pytest.mark.parametrize("data", [1, 2, 8])
def test_held_out_rows_are_measured_and_change_nothing(data: int) -> None:
    actor = make_actor(data=data)
    before = actor.table.detach().clone()
    task = make_task(actor, micro_batch_tokens=9)
    expected = float(cross_entropy(before.double(), rows_of(5, seed=1), [*range(5)]))
    for _ in range(2):
        assert values(task.validate()) == {"sft/val_loss": pytest.approx(expected, rel=1e-6)}
    assert torch.equal(actor.table, before)
