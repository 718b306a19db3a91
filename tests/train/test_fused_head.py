"""How the fused head computes: tiles, types, memory, and what it leaves out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.train import logit_tiles
from megappo.train.fused_head import HeadOptions, VocabShard
from megappo.train.log_probs import TokenStatistics, compute_token_statistics
from megappo.train.logit_tiles import TileSize


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 3 x 4, so that a small case has whole and broken ones in both directions."""
    monkeypatch.setitem(logit_tiles.TILE_SIZES, "cpu", TileSize(elements=12, rows=3))


def make_case(num_rows: int, vocab: int, features: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Hidden states [n, H] and weight [V, H] with logits of order 3, tokens [n]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, features, generator=generator)
    weight = torch.randn(vocab, features, generator=generator) * 3 * features**-0.5
    return hidden, weight, torch.randint(0, vocab, (num_rows,), generator=generator)


def statistics_of(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, **options: Any) -> TokenStatistics:
    rows = torch.arange(len(tokens))
    shard = VocabShard(start=0, size=len(weight))
    return compute_token_statistics(hidden, weight, rows, tokens, HeadOptions(shard=shard, **options))


def everything(case: tuple[torch.Tensor, ...], temperature: float) -> list[Any]:
    """Statistics and the gradients of a loss that uses all that have one."""
    hidden, weight, tokens = case
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    options = {"temperature": temperature, "with_entropy": True, "with_sum_squared_probs": True}
    found = statistics_of(leaves[0], leaves[1], tokens, **options)
    assert found.entropy is not None
    factors = torch.linspace(-1, 1, len(tokens), dtype=hidden.dtype)
    (found.log_probs @ factors + 0.3 * found.entropy @ factors.square()).backward()
    return [found.log_probs, found.entropy, found.sum_squared_probs, *(leaf.grad for leaf in leaves)]


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 9),
    vocab=st.integers(1, 40),
    tile_rows=st.integers(1, 9),
    tile_elements=st.integers(1, 60),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_tiles_change_no_number(
    num_rows: int, vocab: int, tile_rows: int, tile_elements: int, temperature: float
) -> None:
    hidden, weight, tokens = make_case(num_rows, vocab, 8)
    case = hidden.double(), weight.double(), tokens
    whole = everything(case, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logit_tiles.TILE_SIZES, "cpu", TileSize(elements=tile_elements, rows=tile_rows))
        tiled = everything(case, temperature)
    for one, other in zip(tiled, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)  # float64 sums in another order


@pytest.mark.parametrize(("tile_rows", "tile_elements"), [(5, 40), (7, 300), (64, 4096)])
def test_tiles_move_fp32_log_probs_and_entropies_by_less_than_1e_6(
    tile_rows: int, tile_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(50, 300, 8)
    whole = everything(case, 1.0)
    monkeypatch.setitem(logit_tiles.TILE_SIZES, "cpu", TileSize(elements=tile_elements, rows=tile_rows))
    for one, other in zip(everything(case, 1.0)[:3], whole):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, tokens = make_case(7, 10, 5)

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = statistics_of(hidden, weight, tokens, temperature=0.6, with_entropy=True)
        assert found.entropy is not None
        return found.log_probs, found.entropy

    leaves = tuple(tensor.double().requires_grad_() for tensor in (hidden, weight))
    assert torch.autograd.gradcheck(function, leaves, atol=1e-7, rtol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_logits_that_grow_from_tile_to_tile_overflow_nowhere() -> None:
    hidden, weight = torch.ones(1, 1), torch.arange(0.0, 2000.0, 100.0).unsqueeze(1)
    found = statistics_of(hidden, weight, torch.tensor([18]), with_entropy=True, with_sum_squared_probs=True)
    # Logits 0, 100, ..., 1900: all probability is on the last, log p of the one before is -100.
    assert found.log_probs.item() == -100.0
    assert found.entropy is not None and found.entropy.item() == pytest.approx(0.0, abs=1e-30)
    assert found.sum_squared_probs is not None and found.sum_squared_probs.item() == 1.0


def make_bfloat16_case() -> tuple[torch.Tensor, ...]:
    """Multiples of 1/8, whose products and sums are exact in fp32: only the rounding of logits to bfloat16 is left."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-12, 13, (9, 8), generator=generator) / 8
    weight = torch.randint(-12, 13, (50, 8), generator=generator) / 8
    return hidden.bfloat16(), weight.bfloat16(), torch.randint(0, 50, (9,), generator=generator)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("fp32_head", [False, True])
def test_bfloat16_logits_are_rounded_only_without_fp32_and_evaluated_in_fp32(fp32_head: bool) -> None:
    hidden, weight, tokens = make_bfloat16_case()
    exact = hidden.double() @ weight.double().t()
    rounded = exact.bfloat16().double()
    assert (exact - rounded).abs().max() > 5e-3

    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    found = statistics_of(leaves[0], leaves[1], tokens, fp32=fp32_head).log_probs
    expected = torch.log_softmax(exact if fp32_head else rounded, -1).gather(1, tokens[:, None])[:, 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=1e-6)

    found.sum().backward()
    doubles = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    torch.log_softmax(doubles[0] @ doubles[1].t(), -1).gather(1, tokens[:, None]).sum().backward()
    for mine, wanted in zip(leaves, doubles):
        assert mine.grad is not None and wanted.grad is not None and mine.grad.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits, so a result is off by up to 2^-8 of it; without fp32 p is off by as much, too.
        allowed = (2**-7.9 if fp32_head else 2**-6) * wanted.grad.abs().max().item()
        torch.testing.assert_close(mine.grad.double(), wanted.grad, atol=allowed, rtol=0)


@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_bfloat16_weights_are_summed_over_rows_in_fp32() -> None:
    # Logits 0 and 0: p = 1/2, so each row adds 1/2 * its hidden state to the gradient of the chosen token's weight.
    # In bfloat16 256 + 1/2 is 256: a sum that was rounded between tiles of three rows would stop there.
    num_rows = 1200
    hidden, weight = torch.ones(num_rows, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    statistics_of(hidden, weight, torch.zeros(num_rows, dtype=torch.int64)).log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [600.0, -600.0]


@pytest.mark.usefixtures("small_tiles")
def test_only_rows_that_are_asked_for_and_have_a_gradient_are_projected() -> None:
    """0 * NaN is NaN: what is multiplied leaves a mark."""
    hidden, weight, tokens = make_case(7, 10, 5)
    asked = torch.tensor([6, 0, 3, 4])
    hidden[[1, 2, 5]] = float("nan")  # not asked for
    hidden[3] = float("nan")  # asked for, without gradient
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    options = HeadOptions(shard=VocabShard(start=0, size=10), with_entropy=True)
    found = compute_token_statistics(leaves[0], leaves[1], asked, tokens[:4], options)
    assert found.log_probs.isfinite().tolist() == [True, True, False, True]
    (found.log_probs[[0, 1, 3]].sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all())
    assert leaves[0].grad is not None and (leaves[0].grad[[1, 2, 3, 5]] == 0).all()


@pytest.mark.usefixtures("small_tiles")
def test_gradients_that_are_not_finite_are_passed_on() -> None:
    hidden, weight, tokens = make_case(7, 10, 5)
    weight.requires_grad_()
    statistics_of(hidden, weight, tokens).log_probs.backward(torch.full((7,), float("nan")))
    assert weight.grad is not None and bool(weight.grad.isnan().all())


@pytest.mark.usefixtures("small_tiles")
def test_a_frozen_weight_has_no_gradient_and_changes_no_other() -> None:
    hidden, weight, tokens = make_case(7, 10, 5)
    gradients = []
    for is_trained in (True, False):
        leaf, own = hidden.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
        statistics_of(leaf, own, tokens).log_probs.sum().backward()
        gradients.append(leaf.grad)
        assert (own.grad is not None) == is_trained
    assert torch.equal(*gradients)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a result of any operation had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_tensor(case: tuple[torch.Tensor, ...], compute: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> int:
    hidden, weight, tokens = case
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    with LargestTensor() as largest:
        log_probs, entropy = compute(*leaves, tokens)
        (log_probs.sum() + entropy.sum()).backward()
    return largest.elements


def test_nothing_larger_than_a_tile_or_a_gradient_is_ever_made() -> None:
    num_rows, vocab, features = 2048, 32768, 16
    case = make_case(num_rows, vocab, features)

    def fused(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = statistics_of(*inputs, with_entropy=True)
        assert found.entropy is not None
        return found.log_probs, found.entropy

    def plain(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(hidden @ weight.t(), -1)
        return log_p.gather(1, tokens[:, None]), -(log_p.exp() * log_p).sum(-1)

    bound = max(logit_tiles.TILE_SIZES["cpu"].elements, vocab * features, num_rows * features)
    assert bound < num_rows * vocab / 32
    assert largest_tensor(case, fused) <= bound
    few = (case[0][:64], case[1], case[2][:64])
    assert largest_tensor(few, plain) == 64 * vocab  # the measurement sees logits where there are any
