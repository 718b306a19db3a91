"""Vocabulary-parallel statistics against float64 softmax."""

import pytest
import torch

from megappo.config.parallelism import ParallelismConfig
from megappo.train import log_probs
from megappo.train.log_probs import VocabShard, compute_token_statistics, vocab_shard
from tests.dist_world import DistWorld
from tests.train.jobs import shard_statistics, statistics_case

VOCAB = 37


def make_case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(11, VOCAB, generator=generator) * 3).to(dtype)
    rows = torch.tensor([7, 0, 3, 10, 4])
    tokens = torch.randint(0, VOCAB, (5,), generator=generator)
    return logits, rows, tokens


def reference(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits[rows].double() / temperature, -1)
    chosen = log_p.gather(1, tokens[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("tile_elements", [1, 2 * VOCAB, 2**22])
def test_statistics_and_gradient_equal_float64_softmax_for_any_tile(
    temperature: float, tile_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "TILE_ELEMENTS", tile_elements)
    logits, rows, tokens = make_case()
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    statistics = compute_token_statistics(
        ours,
        rows,
        tokens,
        shard=VocabShard(start=0, size=VOCAB),
        temperature=temperature,
        with_entropy=True,
        with_sum_squared_probs=True,
    )
    expected = reference(theirs, rows, tokens, temperature)
    assert statistics.entropy is not None and statistics.sum_squared_probs is not None
    for mine, wanted in zip((statistics.log_probs, statistics.entropy, statistics.sum_squared_probs), expected):
        torch.testing.assert_close(mine.double(), wanted, atol=2e-6, rtol=1e-6)

    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    bonus = torch.tensor([0.3, 0.0, -1.0, 2.0, 5.0])
    (statistics.log_probs @ weights + statistics.entropy @ bonus).backward()
    (expected[0] @ weights.double() + expected[1] @ bonus.double()).backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-6)


def test_each_result_alone_has_the_gradient_it_has_beside_the_other() -> None:
    logits, rows, tokens = make_case()
    shard = VocabShard(start=0, size=VOCAB)

    def gradient(log_prob_weight: float, entropy_weight: float) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        statistics = compute_token_statistics(leaf, rows, tokens, shard=shard, with_entropy=entropy_weight != 0)
        loss = leaf.sum() * 0
        if log_prob_weight:
            loss = loss + log_prob_weight * statistics.log_probs.sum()
        if statistics.entropy is not None:
            loss = loss + entropy_weight * statistics.entropy.sum()
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(2, 0) + gradient(0, -3), gradient(2, -3), atol=1e-6, rtol=0)


def test_logits_are_left_as_they_are_and_can_be_used_again() -> None:
    logits, rows, tokens = make_case()
    shard = VocabShard(start=0, size=VOCAB)
    source = logits.clone().requires_grad_()
    intermediate = source * 1.0
    first = compute_token_statistics(intermediate, rows, tokens, shard=shard, with_entropy=True, temperature=0.5)
    second = compute_token_statistics(intermediate, rows, tokens, shard=shard, with_entropy=True, temperature=0.5)
    assert torch.equal(intermediate, logits)
    assert first.entropy is not None
    (first.log_probs.sum() + second.log_probs.sum() + first.entropy.sum()).backward()
    alone = logits.double().requires_grad_()
    log_p = torch.log_softmax(alone[rows] / 0.5, -1)
    (2 * log_p.gather(1, tokens[:, None]).sum() - (log_p.exp() * log_p).sum()).backward()
    assert source.grad is not None and alone.grad is not None
    torch.testing.assert_close(source.grad.double(), alone.grad, atol=3e-6, rtol=1e-6)


def test_padding_columns_take_no_probability_and_no_gradient() -> None:
    logits, rows, tokens = make_case()
    padded = torch.cat([logits, torch.full((11, 3), 50.0)], 1).requires_grad_()
    statistics = compute_token_statistics(
        padded, rows, tokens, shard=VocabShard(start=0, size=VOCAB), with_entropy=True
    )
    expected = reference(logits, rows, tokens, 1.0)
    torch.testing.assert_close(statistics.log_probs.double(), expected[0], atol=2e-6, rtol=1e-6)
    assert statistics.entropy is not None
    (statistics.log_probs.sum() + statistics.entropy.sum()).backward()
    assert padded.grad is not None
    assert (padded.grad[:, VOCAB:] == 0).all()
    assert (padded.grad[[1, 2, 5, 6, 8, 9]] == 0).all()  # rows that were not asked for


def test_bfloat16_logits_are_evaluated_in_fp32() -> None:
    logits, rows, tokens = make_case(torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    statistics = compute_token_statistics(leaf, rows, tokens, shard=VocabShard(start=0, size=VOCAB), temperature=0.7)
    assert statistics.log_probs.dtype == torch.float32
    torch.testing.assert_close(
        statistics.log_probs.double(), reference(logits, rows, tokens, 0.7)[0], atol=3e-6, rtol=1e-6
    )
    statistics.log_probs.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16


def test_no_rows_give_empty_results_that_still_backpropagate_zero() -> None:
    logits = torch.randn(4, VOCAB, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    statistics = compute_token_statistics(logits, none, none, shard=VocabShard(start=0, size=VOCAB))
    statistics.log_probs.sum().backward()
    assert logits.grad is not None and (logits.grad == 0).all()


def test_temperature_divides_the_logits() -> None:
    # logits [2, 1, 0] at T = 0.5 are [4, 2, 0]: log-probs -0.1429, -2.1429, -4.1429.
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    three = torch.arange(3)
    shard = VocabShard(start=0, size=3)
    cold = compute_token_statistics(logits, three, three, shard=shard, temperature=0.5).log_probs
    torch.testing.assert_close(cold, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=1e-4, rtol=0)
    plain = compute_token_statistics(logits, three, three, shard=shard).log_probs
    torch.testing.assert_close(plain, torch.tensor([-0.4076, -1.4076, -2.4076]), atol=1e-4, rtol=0)


def test_a_uniform_distribution_has_entropy_log_v_and_collision_probability_1_over_v() -> None:
    row = torch.arange(1)
    statistics = compute_token_statistics(
        torch.full((1, 8), 3.0), row, row, shard=VocabShard(start=0, size=8), with_entropy=True,
        with_sum_squared_probs=True,
    )  # fmt: skip
    assert statistics.entropy is not None and statistics.sum_squared_probs is not None
    assert statistics.entropy.item() == pytest.approx(2.0794, abs=1e-4)
    assert statistics.sum_squared_probs.item() == pytest.approx(0.125)


def test_one_rank_holds_the_whole_vocabulary_without_padding() -> None:
    assert vocab_shard(37, 40, None) == VocabShard(start=0, size=37)


@pytest.mark.parametrize("vocab_size", [36, 37, 3])
def test_two_shards_give_the_statistics_and_gradient_of_the_whole_vocabulary(world: DistWorld, vocab_size: int) -> None:
    # 37: the second shard ends with a padding column.
    results = world.run(
        shard_statistics, parallelism=ParallelismConfig(tensor=2), vocab_size=vocab_size, temperature=0.7
    )
    logits, rows, tokens, weights, bonus = statistics_case(vocab_size)
    whole = logits.double().requires_grad_()
    expected = reference(whole, rows, tokens, 0.7)
    (expected[0] @ weights.double() + expected[1] @ bonus.double()).backward()
    assert whole.grad is not None
    for result in results:
        for mine, wanted in zip(result[:3], expected):
            torch.testing.assert_close(mine.double(), wanted, atol=3e-6, rtol=1e-6)
    gradient = torch.cat([result[3] for result in results], 1)
    torch.testing.assert_close(gradient[:, :vocab_size].double(), whole.grad, atol=2e-6, rtol=1e-6)
    assert (gradient[:, vocab_size:] == 0).all()
