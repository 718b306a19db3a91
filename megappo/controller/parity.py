"""The parity monitor: do engines and trainer compute the same log-probs?

Workers compare tokens and send three numbers per sequence (`algo.diagnostics.SequenceGaps`); here they are held against
`rollout.parity`. Of a step beyond its limits the few worst sequences, or all (`record.when=[parity]`), are recorded.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megappo.algo.diagnostics import SequenceGaps
from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.run import RunConfig
from megappo.controller.comparison import ParityFinding, StepComparison
from megappo.errors import ParityError
from megappo.observability.metrics import Metrics

_AREA = "actor/rollout_log_prob_diff/"

Warn = Callable[[str], None]
"""Says one line to whoever watches the run."""


def gather_gaps(parts: Sequence[SequenceGaps | None], gather: Callable[..., np.ndarray]) -> SequenceGaps | None:
    """Put the gaps of all shards into the order of the step's sequences; None when nothing was compared.

    Args:
        gather: (one array per shard) -> [B].
    """
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not sum(int(part.tokens.sum()) for part in known):
        return None
    return SequenceGaps(
        tokens=gather([part.tokens for part in known]),
        total=gather([part.total for part in known]),
        largest=gather([part.largest for part in known]),
    )


def check_parity(
    comparison: StepComparison, config: RunConfig, warn: Warn, record: Callable[[ParityFinding], str]
) -> None:
    """Hold one step against the limits: warn in one line, or end the run, with the worst sequences recorded.

    Args:
        record: asks for a record; returns where it will be, or why there will be none.

    Raises:
        ParityError: a limit of `rollout.parity.stop` is exceeded.
    """
    parity = config.rollout.parity
    broken, stops = _judge(parity, mean=comparison.mean, largest=comparison.largest)
    if not broken:
        return
    worst = comparison.worst(max(parity.dump, 1), by_mean=".mean" in broken[0])
    place = record(ParityFinding(comparison=comparison, reasons=broken, stops=stops, worst=worst))
    numbers = _numbers(comparison)
    if stops:
        names = [comparison.describe(row) for row in worst]
        raise ParityError(_explain(comparison.step, broken, numbers, names, place, config))
    info = comparison.sequences[worst[0]]
    of_worst = f"worst: sequence {info.sequence_id} (row {info.row})"
    warn(_warning(comparison.step, broken, numbers, of_worst, place))


def check_update(
    metrics: Metrics,
    config: RunConfig,
    warn: Warn,
    record: Callable[[list[str]], str],
    *,
    step: int,
    all_current: bool,
) -> Metrics:
    """Hold the difference that the update's first step measured against the limits, where no pass before it did.

    Args:
        metrics: of the update.
        record: asks for a record because of the limits given; returns where it will be, or why there will be none.
        all_current: whether the current weights sampled every sequence of the step.

    Returns:
        The metrics; without the difference when some of it is the age of the rollouts.

    Raises:
        ParityError: a limit of `rollout.parity.stop` is exceeded; the update has been made.
    """
    if not all_current:
        return {name: stat for name, stat in metrics.items() if not name.startswith(_AREA)}
    mean, largest = metrics.get(f"{_AREA}mean"), metrics.get(f"{_AREA}max")
    if mean is None or largest is None or mean.value is None or largest.value is None:
        return metrics
    broken, stops = _judge(config.rollout.parity, mean=mean.value, largest=largest.value)
    numbers = f"mean {mean.value:.3g}, max {largest.value:.3g} nats over {mean.count:,.0f} loss tokens"
    if not broken:
        return metrics
    place = record(broken)
    if stops:
        raise ParityError(_explain(step, broken, numbers, [], place, config))
    warn(_warning(step, broken, numbers, place))
    return metrics


def _judge(parity: ParityConfig, *, mean: float, largest: float) -> tuple[list[str], bool]:
    """Return the exceeded limits in words, and whether they are those that end the run."""
    if stops := broken_limits(parity.stop, "stop", mean=mean, largest=largest):
        return stops, True
    return broken_limits(parity.warn, "warn", mean=mean, largest=largest), False


def _warning(step: int, broken: Sequence[str], *details: str) -> str:
    """Return the line of a step that goes on."""
    found = "; ".join([" and ".join(broken), *details])
    return f"step {step}: log-probs of engine and trainer differ: {found}; docs/parity.md says what to do"


def broken_limits(limits: ParityLimits, level: str, *, mean: float, largest: float) -> list[str]:
    """Return the exceeded limits in words; a number that is not finite exceeds every limit."""
    found = (("mean", limits.mean, mean), ("max", limits.max, largest))
    return [
        f"{name} {value:.3g} > rollout.parity.{level}.{name}={limit:g}"
        for name, limit, value in found
        if limit is not None and not value <= limit
    ]


def _numbers(comparison: StepComparison) -> str:
    compared = int(comparison.gaps.tokens.sum())
    total = sum(info.sampled_tokens for info in comparison.sequences)
    correlation = "" if comparison.pearson_r is None else f", r {comparison.pearson_r:.4f}"
    share = "" if compared == total else f" (of {total:,}; older weights sampled the others)"
    return (
        f"mean {comparison.mean:.3g}, max {comparison.largest:.3g} nats{correlation} over {compared:,} response tokens"
        f"{share}"
    )


def _explain(
    step: int, broken: Sequence[str], numbers: str, worst: Sequence[str], place: str, config: RunConfig
) -> str:
    """Return the message of the error that ends a run."""
    shown = [f"  {line}" for line in worst]
    sampling, engine = config.rollout.sampling, config.rollout.engine
    return "\n".join(
        [
            f"step {step}: log-probs of engine and trainer are too far apart: {' and '.join(broken)}; {numbers}",
            *(["worst sequences:", *shown] if shown else []),
            place,
            "what to try (docs/parity.md):",
            f"  temperature: the trainer scores logits / {sampling.temperature:g} (rollout.sampling.temperature); does "
            "anything tell the engine otherwise?",
            "  versions: rollout/policy_version/min of earlier steps; weight_sync.verify=full compares every tensor "
            "of a hand-over",
            f"  precision: the trainer computes in {config.model.dtype.value} (model.dtype), the engine in "
            f"{config.rollout.weight_dtype(config.model).value} (rollout.dtype); float32 on both brings a correct "
            "small model to 1e-4 or less",
            f"  engine: the same run with rollout.engine={'hf' if engine == 'sglang' else 'sglang'} tells whose "
            "log-probs are off",
            "  to train nevertheless: raise rollout.parity.stop and turn algorithm.correction on",
        ]
    )
