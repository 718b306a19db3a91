"""Rotary position embeddings: what config.json says about them. Torch-free.

Scaled variants change the frequencies, and yarn also the size of queries and keys; both are constants of the model.
Which variants there are, and which are refused, is in `megappo.config.model_support`.
"""

import math
from dataclasses import dataclass

from megappo.config.model_support import Content, original_positions, rope_kind, rope_settings


@dataclass(kw_only=True, slots=True, frozen=True)
class LinearScaling:
    """All frequencies divided by one factor."""

    factor: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths beyond the original context / low_freq_factor are stretched by `factor`, those below the
    original context / high_freq_factor stay, and in between is a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(kw_only=True, slots=True, frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3)."""

    factor: float
    original_positions: int
    beta_fast: float
    """Dimensions that turn more often than this within the original context keep their frequency."""
    beta_slow: float
    """Dimensions that turn less often are divided by `factor`; in between is a ramp."""
    truncate: bool
    """Whether the ramp begins and ends at whole dimensions."""
    attention_factor: float
    """Scale of rotated queries, and of keys."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(kw_only=True, slots=True, frozen=True)
class Rope:
    """Rotary position embedding of a model."""

    theta: float
    scaling: RopeScaling | None = None


def read_rope(content: Content, *, default_theta: float) -> Rope:
    """Read the rotary settings of a config.json without faults.

    Args:
        default_theta: where config.json names none.
    """
    rope, kind = rope_settings(content), rope_kind(content)
    theta = float(rope.get("rope_theta", content.get("rope_theta", default_theta)))
    if kind == "default":
        return Rope(theta=theta)
    return Rope(theta=theta, scaling=_READERS[kind]({**rope, "original_positions": original_positions(content)}))


def _read_linear(rope: Content) -> LinearScaling:
    return LinearScaling(factor=float(rope["factor"]))


def _read_llama3(rope: Content) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_positions"]),
    )


def _read_yarn(rope: Content) -> YarnScaling:
    factor = float(rope["factor"])
    return YarnScaling(
        factor=factor,
        original_positions=int(rope["original_positions"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Content, factor: float) -> float:
    """Return the factor that config.json names, or 0.1 ln(factor) + 1 (eq. 22); DeepSeek weights the logarithm."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(float(rope["mscale"])) / scale(float(rope["mscale_all_dim"]))
    return scale(1.0)


_READERS = {"linear": _read_linear, "llama3": _read_llama3, "yarn": _read_yarn}
