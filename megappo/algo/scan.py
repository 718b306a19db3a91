"""Sums over what follows within each sequence, and moments, of packed tokens on a mask.

Shapes: N packed tokens, B sequences. Nothing off the mask is read; outputs are exactly 0 there. Many tokens go through
a compiled loop, few through its twin in torch operations, `tensor_scan`, which also takes tensors
of any device (tests/algo/test_scan.py holds one against the other). Sums run in float64.
"""

import math

import numpy as np
import torch

from megappo.algo import tensor_scan
from megappo.algo.masked import Moments

COMPILED_FROM = 1 << 16
"""Tokens from which the compiled loops are used. Fewer do not repay importing numba, a quarter of a second, and
compiling, seconds where nothing is cached."""


def suffix_sums(values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, decay: float) -> np.ndarray:
    """Return y [N] with y_t = x_t + decay * y_next, "next" being the next token on the mask of the same sequence.

    Args:
        values: [N] float32 or float64; offsets: [B+1] int64.
    """
    if len(values) < COMPILED_FROM:
        layout = torch.as_tensor(mask), torch.as_tensor(offsets)
        found = tensor_scan.suffix_sums(_double(values), *layout, decay)
        return found.numpy().astype(values.dtype, copy=False)
    from megappo.algo import compiled

    out = np.empty_like(values)
    compiled.suffix_sums(values, mask, offsets, decay, out)
    return out


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages A [N] and returns A + V [N]: A_t = R_t + gamma V_next - V_t + gamma lam A_next, "next" being
    the next token on the mask of the same sequence (none: V and A are 0).

    Args:
        rewards, values: [N] float32 or float64; offsets: [B+1] int64.
    """
    if len(values) < COMPILED_FROM:
        layout = torch.as_tensor(mask), torch.as_tensor(offsets)
        found = tensor_scan.generalized_advantages(_double(rewards), _double(values), *layout, gamma=gamma, lam=lam)
        advantages, returns = (out.numpy().astype(values.dtype, copy=False) for out in found)
        return advantages, returns
    from megappo.algo import compiled

    out = np.empty_like(values), np.empty_like(values)
    compiled.generalized_advantages(rewards, values, mask, offsets, gamma, lam, *out)
    return out


def masked_moments(values: np.ndarray, mask: np.ndarray) -> tuple[Moments, float, float]:
    """Return the moments, the largest and the smallest of the values [N] on the mask [N]; -inf and inf of none."""
    if len(values) < COMPILED_FROM:
        return tensor_scan.masked_moments(torch.as_tensor(values), torch.as_tensor(mask))
    from megappo.algo import compiled

    out = np.empty(3)
    compiled.masked_moments(values, mask, out)
    count, mean, m2 = out.tolist()
    return Moments(count=count, mean=mean, m2=m2), *_masked_extremes(values, mask, mean)


def _masked_extremes(values: np.ndarray, mask: np.ndarray, mean: float) -> tuple[float, float]:
    """Return the largest and smallest of the values [N] on the mask [N]; their mean says whether to look for NaN."""
    from megappo.algo import compiled

    if math.isnan(mean) and bool(np.isnan(values, where=mask, out=np.zeros_like(mask)).any()):
        return math.nan, math.nan
    bits = values.view(np.int32 if values.dtype == np.float32 else np.int64)
    limits = np.iinfo(bits.dtype)
    keys = np.array([limits.min, limits.max], dtype=bits.dtype)
    compiled.masked_extremes(bits, mask, keys)
    if keys[0] < keys[1]:  # nothing is on the mask
        return -math.inf, math.inf
    largest, smallest = np.where(keys >= 0, keys, keys ^ limits.max).astype(bits.dtype).view(values.dtype).tolist()
    return largest, smallest


def _double(values: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64)
