"""Frequencies of rotary position embeddings, in float32 and in the order of operations that transformers has.

Shapes: D head size.
"""

import math

import torch

from megappo.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling


def compute_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle per position of every pair of dimensions, [D / 2] float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if isinstance(rope.scaling, LinearScaling):
        return frequencies / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(frequencies, rope.scaling)
    if isinstance(rope.scaling, YarnScaling):
        return _yarn(rope.theta**exponents, rope.theta, rope.scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    kept = scaling.original_positions / wavelength - scaling.low_freq_factor
    kept = kept / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    scaled = torch.where(wavelength > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)


def _yarn(periods: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    pairs = len(periods)

    def dimension_of(turns: float) -> float:
        """Dimension (of 2 * pairs) that turns so often within the original context."""
        return pairs * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
