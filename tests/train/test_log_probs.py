"""Statistics of chosen tokens, from hidden states and a vocabulary-parallel weight, against float64 softmax.

Tolerances: fp32 sums of some ten terms in another order, on logits of order 3.
"""

import pytest
import torch

from megappo.config.parallelism import ParallelismConfig
from megappo.train.fused_head import HeadOptions, VocabShard
from megappo.train.log_probs import TokenStatistics, compute_token_statistics, vocab_shard
from tests.dist_world import DistWorld
from tests.train.jobs import shard_statistics, statistics_case

VOCAB = 37
WHOLE = VocabShard(start=0, size=VOCAB)


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropy and sum of squares with the whole logits."""
    log_p = torch.log_softmax((hidden @ weight.t())[rows] / temperature, -1)
    chosen = log_p.gather(1, tokens[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


def all_of(statistics: TokenStatistics) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert statistics.entropy is not None and statistics.sum_squared_probs is not None
    return statistics.log_probs, statistics.entropy, statistics.sum_squared_probs


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_statistics_and_gradients_equal_float64_softmax(temperature: float) -> None:
    hidden, weight, rows, tokens, weights, bonus = statistics_case(VOCAB)
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    theirs = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    statistics = compute_token_statistics(
        ours[0],
        ours[1],
        rows,
        tokens,
        HeadOptions(shard=WHOLE, temperature=temperature, with_entropy=True, with_sum_squared_probs=True),
    )
    expected = reference(theirs[0], theirs[1], rows, tokens, temperature)
    for mine, wanted in zip(all_of(statistics), expected):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), wanted, atol=3e-6, rtol=1e-6)

    assert statistics.entropy is not None
    (statistics.log_probs @ weights + statistics.entropy @ bonus).backward()
    (expected[0] @ weights.double() + expected[1] @ bonus.double()).backward()
    for mine, wanted in zip(ours, theirs):
        assert mine.grad is not None and wanted.grad is not None
        torch.testing.assert_close(mine.grad.double(), wanted.grad, atol=1e-5, rtol=1e-6)


def test_each_result_alone_has_the_gradient_it_has_beside_the_other() -> None:
    hidden, weight, rows, tokens, *_ = statistics_case(VOCAB)

    def gradient(log_prob_weight: float, entropy_weight: float) -> torch.Tensor:
        leaf = weight.clone().requires_grad_()
        statistics = compute_token_statistics(
            hidden, leaf, rows, tokens, HeadOptions(shard=WHOLE, with_entropy=entropy_weight != 0)
        )
        loss = leaf.sum() * 0
        if log_prob_weight:
            loss = loss + log_prob_weight * statistics.log_probs.sum()
        if statistics.entropy is not None:
            loss = loss + entropy_weight * statistics.entropy.sum()
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(2, 0) + gradient(0, -3), gradient(2, -3), atol=3e-6, rtol=0)


def test_an_entropy_that_no_loss_uses_changes_no_gradient() -> None:
    hidden, weight, rows, tokens, weights, _ = statistics_case(VOCAB)
    gradients = []
    for with_entropy in (False, True):
        leaf = weight.clone().requires_grad_()
        statistics = compute_token_statistics(
            hidden, leaf, rows, tokens, HeadOptions(shard=WHOLE, with_entropy=with_entropy)
        )
        (statistics.log_probs @ weights).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_inputs_are_left_as_they_are_and_can_be_used_again() -> None:
    hidden, weight, rows, tokens, *_ = statistics_case(VOCAB)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    used = [leaf * 1.0 for leaf in leaves]
    first, second = (
        compute_token_statistics(
            used[0], used[1], rows, tokens, HeadOptions(shard=WHOLE, with_entropy=True, temperature=0.5)
        )
        for _ in range(2)
    )
    assert first.entropy is not None
    (first.log_probs.sum() + second.log_probs.sum() + first.entropy.sum()).backward()
    assert torch.equal(used[0], hidden) and torch.equal(used[1], weight)
    alone = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    log_probs, entropy, _ = reference(alone[0], alone[1], rows, tokens, 0.5)
    (2 * log_probs.sum() + entropy.sum()).backward()
    for mine, wanted in zip(leaves, alone):
        assert mine.grad is not None and wanted.grad is not None
        torch.testing.assert_close(mine.grad.double(), wanted.grad, atol=1e-5, rtol=1e-6)


def test_padding_columns_take_no_probability_and_no_gradient() -> None:
    hidden, weight, rows, tokens, *_ = statistics_case(VOCAB)
    padded = torch.cat([weight, torch.full((3, weight.shape[1]), float("nan"))]).requires_grad_()
    statistics = compute_token_statistics(hidden, padded, rows, tokens, HeadOptions(shard=WHOLE, with_entropy=True))
    expected = reference(hidden.double(), weight.double(), rows, tokens, 1.0)
    torch.testing.assert_close(statistics.log_probs.double(), expected[0], atol=3e-6, rtol=1e-6)
    assert statistics.entropy is not None
    (statistics.log_probs.sum() + statistics.entropy.sum()).backward()
    assert padded.grad is not None and bool(padded.grad[:VOCAB].isfinite().all())
    assert (padded.grad[VOCAB:] == 0).all()


def test_no_rows_give_empty_results_that_still_backpropagate_zero() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(VOCAB, 8, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    statistics = compute_token_statistics(hidden, weight, none, none, HeadOptions(shard=WHOLE, with_entropy=True))
    assert statistics.log_probs.shape == (0,)
    statistics.log_probs.sum().backward()
    assert hidden.grad is not None and (hidden.grad == 0).all()
    assert weight.grad is not None and (weight.grad == 0).all()


def test_temperature_divides_the_logits() -> None:
    # Hidden state (1) and weights (2, 1, 0) give logits [2, 1, 0]; at T = 0.5 they are [4, 2, 0].
    hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [1.0], [0.0]])
    three = torch.arange(3)
    shard = VocabShard(start=0, size=3)
    cold = compute_token_statistics(hidden, weight, three, three, HeadOptions(shard=shard, temperature=0.5)).log_probs
    torch.testing.assert_close(cold, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=1e-4, rtol=0)
    plain = compute_token_statistics(hidden, weight, three, three, HeadOptions(shard=shard)).log_probs
    torch.testing.assert_close(plain, torch.tensor([-0.4076, -1.4076, -2.4076]), atol=1e-4, rtol=0)


def test_a_uniform_distribution_has_entropy_log_v_and_collision_probability_1_over_v() -> None:
    row = torch.arange(1)
    options = HeadOptions(shard=VocabShard(start=0, size=8), with_entropy=True, with_sum_squared_probs=True)
    statistics = compute_token_statistics(torch.full((1, 2), 3.0), torch.ones(8, 2), row, row, options)
    _, entropy, squares = all_of(statistics)
    assert entropy.item() == pytest.approx(2.0794, abs=1e-4)
    assert squares.item() == pytest.approx(0.125)


def test_one_rank_holds_the_whole_vocabulary_without_padding() -> None:
    assert vocab_shard(37, 40, None) == VocabShard(start=0, size=37)


@pytest.mark.parametrize("vocab_size", [36, 37, 3])
def test_two_shards_give_the_statistics_and_gradients_of_the_whole_vocabulary(
    world: DistWorld, vocab_size: int
) -> None:
    # 37: the second shard ends with a padding column.
    results = world.run(
        shard_statistics, parallelism=ParallelismConfig(tensor=2), vocab_size=vocab_size, temperature=0.7
    )
    hidden, weight, rows, tokens, weights, bonus = statistics_case(vocab_size)
    whole = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = reference(whole[0], whole[1], rows, tokens, 0.7)
    (expected[0] @ weights.double() + expected[1] @ bonus.double()).backward()
    grad_hidden, grad_weight = (tensor.grad for tensor in whole)
    assert grad_hidden is not None and grad_weight is not None
    for result in results:
        for mine, wanted in zip(result, (*expected, grad_hidden)):
            torch.testing.assert_close(mine.double(), wanted, atol=1e-5, rtol=1e-6)
    gradient = torch.cat([result[-1] for result in results])
    torch.testing.assert_close(gradient[:vocab_size].double(), grad_weight, atol=1e-5, rtol=1e-6)
    assert (gradient[vocab_size:] == 0).all()
