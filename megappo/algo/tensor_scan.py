"""Sums over what follows within each sequence, and moments, of packed tokens on a mask: in torch operations, on any
device, in the precision of the values.

Shapes: N packed tokens, B sequences; in a scan L numbers, K slots of a block, C blocks. Nothing off the mask is read;
outputs are exactly 0 there.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megappo.algo.masked import RUN_TOKENS, Moments, sequence_runs

_SLOTS = 64
"""K."""
_CPU_RUN = 1 << 19
"""Tokens worked on at a time on a CPU: few enough for its cache, many enough to repay the operations of a scan."""


def suffix_sums(values: Tensor, mask: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """Return y [N] with y_t = x_t + decay * y_next, "next" being the next token on the mask of the same sequence.

    Args:
        values: [N] float; mask: [N] bool; offsets: [B+1] int64.
    """
    out = torch.empty_like(values)
    for run, part_offsets in _runs(offsets):
        off_mask = ~mask[run]
        found = _scan(values[run].masked_fill(off_mask, 0), off_mask, part_offsets, decay)
        out[run] = found.masked_fill_(off_mask, 0)
    return out


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages A [N] and returns A + V [N]: A_t = R_t + gamma V_next - V_t + gamma lam A_next, "next" being
    the next token on the mask of the same sequence (none: V and A are 0).

    What a token takes from the next one is gamma W_next with W = V + lam A, and W_t = V_t + lam (R_t - V_t) + gamma
    lam W_next: one scan.

    Args:
        rewards, values: [N] float; mask: [N] bool; offsets: [B+1] int64.
    """
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    for run, part_offsets in _runs(offsets):
        off_mask = ~mask[run]
        part_rewards, part_values = rewards[run].masked_fill(off_mask, 0), values[run].masked_fill(off_mask, 0)
        found = _scan(torch.lerp(part_values, part_rewards, lam), off_mask, part_offsets, gamma * lam)
        following = torch.zeros_like(found)
        following[:-1] = found[1:]
        following[_last_tokens(part_offsets)] = 0
        found = part_rewards.sub_(part_values).add_(following, alpha=gamma).masked_fill_(off_mask, 0)
        advantages[run] = found
        returns[run] = found.add_(part_values)
    return advantages, returns


def masked_moments(values: Tensor, mask: Tensor) -> tuple[Moments, float, float]:
    """Return the moments, the largest and the smallest of the values [N] on the mask [N]; -inf and inf of none."""
    size = RUN_TOKENS if values.device.type == "cpu" else max(1, len(values))
    moments, largest, smallest = Moments(), [-math.inf], [math.inf]
    for start in range(0, len(values), size):
        part = values[start : start + size].masked_select(mask[start : start + size]).double()
        if not len(part):
            continue
        largest.append(float(part.amax()))
        smallest.append(float(part.amin()))
        mean = float(part.mean())
        part -= mean
        moments = moments.merge(Moments(count=float(len(part)), mean=mean, m2=float(torch.dot(part, part))))
    # Unlike those of Python, the extremes of torch pass on a NaN.
    extremes = torch.tensor([largest, smallest], dtype=torch.float64)
    return moments, float(extremes[0].amax()), float(extremes[1].amin())


def _runs(offsets: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield runs of whole sequences: their tokens, and their offsets in the run. Elsewhere than on a CPU one run holds
    everything."""
    bounds = [(0, len(offsets) - 1)]
    if offsets.device.type == "cpu":
        bounds = sequence_runs(offsets.numpy(), _CPU_RUN)
    for first, last in bounds:
        run = slice(int(offsets[first]), int(offsets[last]))
        yield run, offsets[first : last + 1] - run.start


def _last_tokens(offsets: Tensor) -> Tensor:
    """Return the position of the last token of each sequence that has tokens."""
    return offsets[1:][offsets.diff() > 0] - 1


def _scan(values: Tensor, off_mask: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """Return y [L] with y_t = x_t + f_t y_(t+1): f is 1 off the mask, where a number passes through (x must be 0
    there), 0 at the end of a sequence, else `decay`.

    The numbers are cut into blocks of K that are scanned side by side; the first numbers of all blocks then are a scan
    of the same kind, by doubling; with it every block is completed. In all about 3 K + 4 log2(C) vector operations.
    """
    factors = torch.full_like(values, decay).masked_fill_(off_mask, 1)
    factors[_last_tokens(offsets)] = 0
    missing = -len(values) % _SLOTS
    grid, products = (
        torch.nn.functional.pad(part, (0, missing)).view(-1, _SLOTS).t().contiguous() for part in (values, factors)
    )  # [K, C]; the product of the factors from a slot to the end of its block takes the place of the factor
    rows, row_products, row_goes_on = grid.unbind(), products.unbind(), (products != 0).unbind()
    for slot in range(_SLOTS - 2, -1, -1):
        _add_product(rows[slot], row_products[slot], rows[slot + 1], row_goes_on[slot])
        row_products[slot].mul_(row_products[slot + 1])
    following = torch.zeros_like(rows[0])
    following[:-1] = _scan_by_doubling(rows[0], row_products[0])[1:]
    _add_product(grid, products, following, products != 0)
    return grid.t().reshape(-1)[: len(values)]


def _scan_by_doubling(values: Tensor, factors: Tensor) -> Tensor:
    """Return y [C] with y_t = x_t + f_t y_(t+1): after s steps a number holds what the 2^s numbers from it on give."""
    values, factors, reach = values.clone(), factors.clone(), 1
    while reach < len(values):
        _add_product(values[:-reach], factors[:-reach], values[reach:].clone(), factors[:-reach] != 0)
        factors[:-reach] *= factors[reach:].clone()
        reach *= 2
    return values


def _add_product(target: Tensor, factors: Tensor, values: Tensor, goes_on: Tensor) -> None:
    """Add factors * values where the sequence goes on; beyond its end nothing is added, be the value NaN or not."""
    torch.where(goes_on, torch.addcmul(target, factors, values), target, out=target)
