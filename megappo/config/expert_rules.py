"""Rules about how the experts of a model are spread; the same before a run and where a model is built."""

from dataclasses import dataclass

from megappo.config.parallelism import ParallelismConfig
from megappo.config.pipeline_rules import divisors
from megappo.errors import Violation


@dataclass(kw_only=True, slots=True, frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    num_experts: int
    """Experts of a layer."""
    ffn_hidden_size: int
    """Size of one expert's feed-forward network."""


def expert_violations(layout: ParallelismConfig, experts: ExpertShape | None, *, key: str) -> list[Violation]:
    """Return the reasons why the layout does not suit a model with these experts (None: a dense model).

    Args:
        key: of the layout, for example actor.parallelism.
    """
    spread = (("expert", layout.expert), ("expert_tensor", layout.expert_tensor))
    if experts is None:
        rule, remedy = "is for mixtures of experts, and the model is dense", "use 1"
        return [
            Violation(key=f"{key}.{name}", value=size, rule=rule, remedy=remedy) for name, size in spread if size > 1
        ]
    violations: list[Violation] = []
    counts = (experts.num_experts, experts.ffn_hidden_size)
    for (name, size), count, what in zip(spread, counts, ("experts", "features of an expert")):
        if size > 0 and count % size:
            rule = f"must divide the {count} {what} of the model"
            violations.append(Violation(key=f"{key}.{name}", value=size, rule=rule, remedy=f"use {divisors(count)}"))
    if layout.tensor > 1 and not layout.sequence:
        violations.append(
            Violation(
                key=f"{key}.sequence",
                value=False,
                rule=f"must be true for a mixture of experts with {key}.tensor={layout.tensor}: else every "
                "tensor-parallel rank would send the same tokens to the experts",
                remedy="set it to true",
            )
        )
    return violations
