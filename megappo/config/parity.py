"""How far the log-probs of rollout engines and trainer may be apart."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class ParityLimits:
    """Bounds of |log-prob of the engine - log-prob of the trainer| over the response tokens of a step, in nats per
    token. A difference that is not finite is beyond every bound."""

    mean: float | None = None
    """Largest mean; null: no bound."""
    max: float | None = None
    """Largest difference of one token; null: no bound. Only sharp in float32: in lower precision single unlikely tokens
    differ by whole nats on correct engines."""


@dataclass(kw_only=True, slots=True)
class ParityConfig:
    """Watches whether engines and trainer compute the same log-probs, each step before the update. Only sequences that
    the current weights sampled are compared: of others the difference holds how far the policy moved, too."""

    warn: ParityLimits = field(default_factory=lambda: ParityLimits(mean=0.05))
    """Beyond these a step says so in one line, and its worst sequences are recorded."""
    stop: ParityLimits = field(default_factory=lambda: ParityLimits(mean=0.5))
    """Beyond these the run ends before the update with the worst sequences recorded."""
    dump: int = 4
    """Worst sequences of such a step recorded in `<run>/records/step_000012/`; 0: none. `record.when=[parity]` records
    all sequences."""
    dump_tokens: int = 200_000
    """Most tokens, prompts included, of these; a sequence that does not fit is named without its tokens."""
    dump_files: int = 20
    """Most records of worst sequences that warnings make in one run; a stop always makes its own."""
