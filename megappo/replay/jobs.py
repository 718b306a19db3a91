"""What the processes of a replay are asked for, and what they give back. Needs no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from megappo.balance.layout import RankLayout
from megappo.batch.stages import TokenField
from megappo.config.run import RunConfig
from megappo.observability.metrics import Metrics
from megappo.replay.weights import RoleWeights


@dataclass(kw_only=True, slots=True, frozen=True)
class RankJob:
    """What all processes of a replay do together."""

    record: Path
    role: str
    config: RunConfig
    layout: RankLayout
    weights: RoleWeights
    checks_weights: bool
    """Whether weights that are not those of the record are refused."""
    reference: str | None = None
    """Hugging Face folder of the reference policy; None: its log-probs are not wanted."""
    updates: bool = False
    """Run the update instead of the forward pass."""
    first_step_only: bool = False
    """Of the update, the first optimizer step only."""


@dataclass(kw_only=True, slots=True)
class RankResult:
    """What one process gives back."""

    fields: dict[str, TokenField] = field(default_factory=dict[str, TokenField])
    """old_log_probs, ref_log_probs or values, of its sequences."""
    metrics: Metrics = field(default_factory=Metrics)
    checksums: dict[str, str] = field(default_factory=dict[str, str])
    """Of all tensors, by Hugging Face name; the same from every process, as is what follows."""
    non_finite: dict[str, int] = field(default_factory=dict[str, int])
    """Tensor -> how many of its numbers are NaN or infinite, where any is."""
