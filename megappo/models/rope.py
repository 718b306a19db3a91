"""Rotary position embeddings: what config.json says about them. Torch-free.

Scaled variants change the frequencies, and yarn also the size of queries and keys; both are constants of the model. A
variant whose frequencies depend on the length of a sequence (`dynamic`, `longrope`) is refused: the same token would
have another log-prob in a longer sequence, and engines and trainer disagree about which length counts.
"""

import math
from dataclasses import dataclass
from typing import Any

from megappo.errors import CapabilityError, CheckpointError


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


def read_rope(config: dict[str, Any], *, default_theta: float, file: str) -> Rope:
    """Read the rotary settings: transformers 5 writes `rope_parameters`, transformers 4 `rope_theta`, `rope_scaling`.

    Args:
        default_theta: where config.json names none.
        file: for errors.

    Raises:
        CheckpointError: a key of the scaling is missing.
        CapabilityError: a variant that is not supported.
    """
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = sorted(key for key, value in rope.items() if isinstance(value, dict))
    if nested:
        raise CapabilityError(f"{file}: rope_parameters of their own for {', '.join(nested)} are not supported")
    partial = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if partial != 1.0:
        raise CapabilityError(
            f"{file}: partial_rotary_factor={partial} is not supported (only 1.0; use a model without it)"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in (*_READERS, "default"):
        raise CapabilityError(
            f"{file}: rope scaling={kind!r} is not supported (only default, {', '.join(_READERS)}: their frequencies "
            "do not depend on the length of a sequence)"
        )
    theta = float(rope.get("rope_theta", config.get("rope_theta", default_theta)))
    if kind == "default":
        return Rope(theta=theta)
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    settings = {**rope, "original_positions": original or config.get("max_position_embeddings")}
    try:
        return Rope(theta=theta, scaling=_READERS[kind](settings))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: rope scaling {kind!r} lacks a number: {error} (see {rope})") from error


def _read_linear(rope: dict[str, Any]) -> LinearScaling:
    return LinearScaling(factor=float(rope["factor"]))


def _read_llama3(rope: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_positions"]),
    )


def _read_yarn(rope: dict[str, Any]) -> YarnScaling:
    factor = float(rope["factor"])
    return YarnScaling(
        factor=factor,
        original_positions=int(rope["original_positions"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    """Return the factor that config.json names, or 0.1 ln(factor) + 1 (eq. 22); DeepSeek weights the logarithm."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(float(rope["mscale"])) / scale(float(rope["mscale_all_dim"]))
    return scale(1.0)


_READERS = {"linear": _read_linear, "llama3": _read_llama3, "yarn": _read_yarn}
