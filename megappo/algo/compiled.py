"""Loops that only a compiler makes fast, by numba. `megappo.algo.scan` chooses between them and their twins in torch
operations (`megappo.algo.tensor_scan`).

Shapes: N packed tokens, B sequences. Arrays of tokens are float32 or float64, sums run in float64.
"""

from functools import partial

import numpy as np

from megappo.compilation import compile_loop

_BLOCK = 1024
"""Tokens whose squared deviations are summed around their own mean, in two passes over cached numbers."""


# A product and the sum it goes into may be rounded once, and a sum may run in lanes: faster, and not less exact.
_compile = partial(compile_loop, fastmath={"contract", "reassoc", "nsz"})


@_compile
def suffix_sums(values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, decay: float, out: np.ndarray) -> None:
    """See `tensor_scan.suffix_sums`; `out` [N] is overwritten."""
    for sequence in range(len(offsets) - 1):
        following = 0.0
        for token in range(offsets[sequence + 1] - 1, offsets[sequence] - 1, -1):
            if mask[token]:
                following = values[token] + decay * following
                out[token] = following
            else:
                out[token] = 0.0


@_compile
def generalized_advantages(  # eight arguments: numba takes neither keywords nor dataclasses
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    offsets: np.ndarray,
    gamma: float,
    lam: float,
    advantages: np.ndarray,
    returns: np.ndarray,
) -> None:
    """See `tensor_scan.generalized_advantages`; `advantages` and `returns` [N] are overwritten."""
    decay = gamma * lam
    for sequence in range(len(offsets) - 1):
        advantage, next_value = 0.0, 0.0
        for token in range(offsets[sequence + 1] - 1, offsets[sequence] - 1, -1):
            if mask[token]:
                value = np.float64(values[token])
                # What does not wait for the next token's advantage comes first.
                advantage = (rewards[token] - value + gamma * next_value) + decay * advantage
                next_value = value
                advantages[token] = advantage
                returns[token] = advantage + value
            else:
                advantages[token] = 0.0
                returns[token] = 0.0


@_compile
def masked_moments(values: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    """See `tensor_scan.masked_moments`; `out` [3] float64 becomes count, mean and sum of squared deviations."""
    count, mean, m2 = 0, 0.0, 0.0
    for start in range(0, len(values), _BLOCK):
        part, on_mask = values[start : start + _BLOCK], mask[start : start + _BLOCK]
        part_count, total = 0, 0.0
        for token in range(len(part)):
            part_count += on_mask[token]
            total += np.float64(part[token]) if on_mask[token] else 0.0
        if part_count == 0:
            continue
        part_mean, part_m2 = total / part_count, 0.0
        for token in range(len(part)):
            deviation = part[token] - part_mean if on_mask[token] else 0.0
            part_m2 += deviation * deviation
        both = count + part_count
        delta = part_mean - mean
        mean += delta * part_count / both
        m2 += part_m2 + delta * delta * count * part_count / both
        count = both
    out[0], out[1], out[2] = count, mean, m2


@_compile
def masked_extremes(bits: np.ndarray, mask: np.ndarray, keys: np.ndarray) -> None:
    """Find the largest and the smallest of floats [N], which come as integers of their bits, on the mask.

    `keys` [2], of the type of `bits`, holds the least and the largest integer and becomes the keys of both floats: the
    bits, with all but the sign turned over where that is set. Keys are in the order of their floats, and integers are
    compared several at a time, which floats, for the sake of NaN, are not.
    """
    least, most = keys[0], keys[1]
    largest, smallest = least, most
    for token in range(len(bits)):
        key = bits[token] if bits[token] >= 0 else bits[token] ^ most
        largest = max(largest, key if mask[token] else least)
        smallest = min(smallest, key if mask[token] else most)
    keys[0], keys[1] = largest, smallest
