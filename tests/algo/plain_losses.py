"""The policy losses token by token, in plain Python: part of `plain_algorithm`."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class PlainTokens:
    """The loss tokens of one sequence."""

    current: list[float]
    """Log-probs at which the loss is taken."""
    detached: list[float]
    """Log-probs that a gradient does not see."""
    old: list[float]
    advantages: list[float]
    selected: list[bool]


def token_loss(tokens: PlainTokens, config: dict[str, Any]) -> list[float]:
    """Return the policy loss of each token."""
    moves = [now - before for now, before in zip(tokens.current, tokens.old)]
    if config["name"] == "gmpo":
        clip = config["clip"]
        bounded = [min(x, clip["high"]) if a >= 0 else max(x, -clip["low"]) for x, a in zip(moves, tokens.advantages)]
        ratio = _exp(sum(bounded) / len(bounded))
        return [-a * ratio for a in tokens.advantages]
    ratios = [_exp(x) for x in moves]
    if config["name"] == "gspo":
        held = [now - before for now, before in zip(tokens.detached, tokens.old)]
        of_sequence = _exp(sum(held) / len(held))
        ratios = [of_sequence * math.exp(x - y) for x, y in zip(tokens.current, tokens.detached)]
    return [_one(index, ratio, tokens, config) for index, ratio in enumerate(ratios)]


def _exp(x: float) -> float:
    return math.exp(min(20.0, max(-20.0, x)))


def _surrogate(a: float, ratio: float, clip: dict[str, Any]) -> float:
    loss = max(-a * ratio, -a * min(1 + clip["high"], max(1 - clip["low"], ratio)))
    return min(loss, -a * clip["dual"]) if clip["dual"] is not None and a < 0 else loss


def _one(index: int, ratio: float, tokens: PlainTokens, config: dict[str, Any]) -> float:
    a, lp, old = tokens.advantages[index], tokens.current[index], tokens.old[index]
    held = _exp(tokens.detached[index] - old)
    name, clip, selected = config["name"], config["clip"], tokens.selected[index]
    if name in ("ppo_clip", "gspo"):
        return _surrogate(a, ratio, clip)
    if name == "clip_cov":
        return _surrogate(a, held if selected else ratio, clip)
    if name == "kl_cov":
        return -a * ratio + (config["selected_kl_coef"] * abs(lp - old) if selected else 0.0)
    if name == "cispo":
        return -min(1 + clip["high"], max(1 - clip["low"], held)) * a * lp
    if name == "gpg":
        return -a * lp
    if name == "sapo":
        tau = config["tau_positive"] if a > 0 else config["tau_negative"]
        return -a / (1 + math.exp(-tau * (ratio - 1))) * 4 / tau
    p, q = math.exp(old), math.exp(tokens.detached[index])
    divergence = abs(p - q)
    if config["divergence"] == "binary_kl":
        divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    away = (a > 0 and held > 1) or (a < 0 and held < 1)
    delta = config["delta"] or {"total_variation": 0.15, "binary_kl": 0.05}[config["divergence"]]
    return -a * (held if away and divergence > delta else ratio)
