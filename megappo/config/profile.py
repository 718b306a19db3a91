"""Where the time of a step goes: traces over all processes, and torch profiles of single ones. Off by default."""

from dataclasses import dataclass, field
from enum import Enum


@dataclass(kw_only=True, slots=True)
class TraceConfig:
    """A Chrome trace of the phases of all processes, `<run>/traces/step_000012.json`, and how busy each process was, as
    metrics."""

    steps: list[int] = field(default_factory=list[int])
    """Steps that are traced, such as [3, 12]."""
    freq: int = -1
    """Also every so many steps; -1: no others."""

    def covers(self, step: int) -> bool:
        """Whether a step is traced."""
        return step in self.steps or (self.freq > 0 and step % self.freq == 0)


class ProfiledPhase(Enum):
    """What a profile is taken of."""

    log_probs = "log_probs"
    """Of actor ranks: a pass of the policy or the reference."""
    values = "values"
    """Of critic ranks."""
    experience = "experience"
    """Of actor ranks: rewards of tokens, KL, advantages."""
    update = "update"
    """Of actor and critic ranks: all optimizer steps of the step."""
    weights = "weights"
    """Of actor ranks: export and sending of weights."""
    generate = "generate"
    """Of engines: each batch of rollout.engine=hf; of an SGLang server, which has a profiler of its own, the step."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Profiles of torch.profiler, `<run>/profiles/step_000003-update-actor-0.json.gz`, for Perfetto or TensorBoard."""

    steps: list[int] = field(default_factory=list[int])
    """Steps that are profiled; []: none. The first steps warm up."""
    phases: list[ProfiledPhase] = field(
        default_factory=lambda: [ProfiledPhase.log_probs, ProfiledPhase.values, ProfiledPhase.update]
    )
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks of the actor and of the critic."""
    engines: list[int] = field(default_factory=lambda: [0])
    """Engines, for the phase generate."""
    stack: bool = False
    """Record the Python stack of each operation: files grow tenfold."""
    memory: bool = False
    """Record every allocation."""
    shapes: bool = False
    """Record the shapes of arguments."""
