"""Log-probs and entropy over vocabulary tiles on a device, against the whole logits on the CPU in double precision."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.check import Check
from megappo.train.fused_head import HeadOptions, VocabShard
from megappo.train.log_probs import compute_token_statistics

_SEED = 0
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""TF32 is off unless somebody turns it on; bfloat16 has 8 bits."""


def check_tiles(
    device: torch.device, dtype: torch.dtype, *, tokens: int = 512, vocabulary: int = 151936, features: int = 256
) -> Iterator[Check]:
    """Compare values and gradients; on CUDA also the memory with that of the logits."""
    generator = torch.Generator().manual_seed(_SEED)
    hidden = torch.randn(tokens, features, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, features, generator=generator) * features**-0.5).to(dtype)
    chosen = torch.randint(0, vocabulary, (tokens,), generator=generator)
    factors = torch.randn(tokens, generator=generator)
    expected = _plain(hidden.double(), weight.double(), chosen, factors.double())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = _tiled(hidden.to(device), weight.to(device), chosen.to(device), factors.to(device))
    name = f"tiled log-probs, {device.type} {str(dtype).removeprefix('torch.')}"
    for part, one, other in zip(("log-probs", "entropy", "gradient"), found, expected, strict=True):
        largest = float(other.abs().max())
        difference = float((one.cpu().double() - other).abs().max()) / (largest if part == "gradient" else 1.0)
        yield Check(name=f"{name}: {part}", difference=difference, tolerance=_TOLERANCE[dtype])
    if device.type == "cuda":
        logits = 4 * tokens * vocabulary
        # The weight, its gradient and what is beside them; whole logits and their gradient would be two more.
        share = (torch.cuda.max_memory_allocated(device) - 2 * weight.nbytes) / logits
        yield Check(name=f"{name}: memory, share of the logits", difference=share, tolerance=1.0)


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs [n], entropy [n] and the gradient of the hidden states [n, H], through the whole logits."""
    hidden.requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    log_probs = log_p.gather(1, chosen.unsqueeze(1)).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((log_probs + entropy) * factors).sum().backward()
    assert hidden.grad is not None
    return log_probs.detach(), entropy.detach(), hidden.grad


def _tiled(
    hidden: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same by the trainer's function."""
    hidden.requires_grad_()
    options = HeadOptions(shard=VocabShard(start=0, size=len(weight)), with_entropy=True)
    rows = torch.arange(len(chosen), device=hidden.device)
    found = compute_token_statistics(hidden, weight, rows, chosen, options)
    assert found.entropy is not None
    ((found.log_probs + found.entropy) * factors).sum().backward()
    assert hidden.grad is not None
    return found.log_probs.detach(), found.entropy.detach(), hidden.grad
