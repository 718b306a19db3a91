"""Log-probs and entropy from hidden states, forward and backward, side by side with verl 0.9.1's fused torch path.

Run by `make bench NAME=log_probs`, which installs the peer into .oracle; see benchmarks/README.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from benchmarks.harness import Case, Contender, Goal, Ratio, require_module, run_program
from benchmarks.memory import METHOD, peak_extra_bytes
from benchmarks.registry import VERL
from megappo.train.fused_head import HeadOptions, VocabShard
from megappo.train.log_probs import compute_token_statistics

ENTROPY_COEF = 0.01
FEATURES = 256

Results = tuple[torch.Tensor, torch.Tensor]
"""Log-probs and entropy, [n]."""
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Results]
"""(hidden states [n, H], output weight [V, H], tokens [n]) -> results."""


@dataclass(kw_only=True, frozen=True)
class Sizes:
    """Size of the input, fp32, hidden states and logits of order 1."""

    num_tokens: int
    vocab: int
    features: int = FEATURES

    def describe(self) -> dict[str, object]:
        return {"tokens": self.num_tokens, "vocabulary": self.vocab, "features": self.features, "seed": 0}


class Input:
    """What the functions are called with, and a loss that uses all they return."""

    def __init__(self, sizes: Sizes) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (sizes.num_tokens, sizes.features), (sizes.vocab, sizes.features)
        self.hidden, self.weight = (torch.randn(shape, generator=generator) for shape in shapes)
        self.weight *= sizes.features**-0.5
        self.tokens = torch.randint(0, sizes.vocab, (sizes.num_tokens,), generator=generator)
        self._factors = torch.randn(sizes.num_tokens, generator=generator)
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    def forward_backward(self, function: Function) -> tuple[torch.Tensor | None, ...]:
        """Return log-probs, entropy and the gradients of hidden states and weight."""
        self.hidden.grad = self.weight.grad = None
        log_probs, entropy = function(self.hidden, self.weight, self.tokens)
        ((log_probs * self._factors).mean() - ENTROPY_COEF * entropy.mean()).backward()
        return log_probs.detach(), entropy.detach(), self.hidden.grad, self.weight.grad

    @torch.no_grad()
    def four_products(self) -> None:
        """The matrix products without which it cannot be done: the logits twice, and one for each gradient."""
        for _ in range(2):
            logits = self.hidden @ self.weight.t()
        _ = logits @ self.weight
        _ = logits.t() @ self.hidden


def megappo(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    """Ours."""
    options = HeadOptions(shard=VocabShard(start=0, size=len(weight)), with_entropy=True)
    found = compute_token_statistics(hidden, weight, torch.arange(len(tokens)), tokens, options)
    assert found.entropy is not None
    return found.log_probs, found.entropy


def verl(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    """The peer's fused function, chunks of 512 tokens (its default)."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    log_probs, entropy = FusedLinearForPPO()(hidden.unsqueeze(0), weight, tokens.unsqueeze(0))
    return log_probs[0], entropy[0]


def plain(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    """Autograd through the whole logits, one softmax."""
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    return log_p.gather(1, tokens.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def make_time(quick: bool) -> Case:
    """A vocabulary of which a full copy of the logits still fits."""
    sizes = Sizes(num_tokens=256, vocab=4096) if quick else Sizes(num_tokens=4096, vocab=32768)
    given = Input(sizes)
    return Case(
        key="time",
        question="log-probs and entropy, forward and backward: time",
        sizes=sizes.describe(),
        contenders=[
            Contender(name="verl, fused", run=partial(given.forward_backward, verl)),
            Contender(name="megappo", run=partial(given.forward_backward, megappo)),
            Contender(name="four products", run=given.four_products),
        ],
        ratios=[
            Ratio(name="share of verl", numerator="megappo", denominator="verl, fused"),
            Ratio(name="times four products", numerator="megappo", denominator="four products"),
        ],
        goals=[
            Goal(figure="share of verl", at_most=0.55),
            Goal(figure="times four products", at_most=1.7),
            Goal(figure="largest difference", at_most=1e-5),
        ],
        quantities=partial(_largest_difference, peer="verl, fused"),
    )


def make_memory(quick: bool) -> Case:
    """The vocabulary of a real model. Memory only: nothing is timed."""
    sizes = Sizes(num_tokens=128, vocab=9500) if quick else Sizes(num_tokens=2048, vocab=152000)

    def peaks(_: Mapping[str, object]) -> dict[str, float]:
        ours, theirs = (peak_extra_bytes(partial(_make_work, function, sizes)) for function in (megappo, verl))
        gradient = 4 * sizes.vocab * sizes.features
        return {
            "share of verl": ours / theirs,
            "megappo, MB": ours / 1e6,
            "verl, fused, MB": theirs / 1e6,
            "gradient of the weight, MB": gradient / 1e6,
            "megappo beside that gradient, MB": (ours - gradient) / 1e6,
        }

    return Case(
        key="memory",
        question="log-probs and entropy, forward and backward: peak memory",
        sizes=sizes.describe() | {"memory": METHOD},
        contenders=[],
        goals=[Goal(figure="share of verl", at_most=1 / 6)],
        quantities=peaks,
    )


def make_small(quick: bool) -> Case:
    """The model of the quickstart: a few tokens make up its vocabulary, so that calls cost more than sums."""
    sizes = Sizes(num_tokens=512 if quick else 2048, vocab=64, features=128)
    given = Input(sizes)
    functions = {"verl, fused": verl, "plain": plain, "megappo": megappo}
    return Case(
        key="small",
        question="the same for the model of the quickstart",
        sizes=sizes.describe(),
        contenders=[
            Contender(name=name, run=partial(given.forward_backward, function), repeats=20)
            for name, function in functions.items()
        ],
        ratios=[
            Ratio(name="share of verl", numerator="megappo", denominator="verl, fused"),
            Ratio(name="times plain", numerator="megappo", denominator="plain"),
        ],
        goals=[Goal(figure="share of verl", at_most=1.0), Goal(figure="largest difference", at_most=1e-5)],
        quantities=partial(_largest_difference, peer="verl, fused"),
    )


def _make_work(function: Function, sizes: Sizes) -> Callable[[], object]:
    Input(Sizes(num_tokens=4, vocab=8)).forward_backward(function)  # imports, threads of autograd
    return partial(Input(sizes).forward_backward, function)


def _largest_difference(results: Mapping[str, object], *, peer: str) -> dict[str, float]:
    """Difference of each result, over the peer's largest number where that is above 1 or it is a gradient."""
    ours, theirs = (cast("tuple[torch.Tensor, ...]", results[name]) for name in ("megappo", peer))
    found = []
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        largest = float(other.abs().max())
        found.append(float((one - other).abs().max()) / (max(1.0, largest) if index < 2 else largest))
    return {"largest difference": max(found)}


def main() -> None:
    """Measure the chosen cases."""
    require_module(VERL.module, VERL.remedy)
    run_program(
        "log_probs",
        {"time": make_time, "memory": make_memory, "small": make_small},
        packages=["torch", "verl"],
        pinned=True,
    )


if __name__ == "__main__":
    main()
