"""The parity monitor: do engines and trainer compute the same log-probs?

Workers compare tokens and send three numbers per sequence (`algo.diagnostics.SequenceGaps`); here they are held against
`rollout.parity`, and only the few worst sequences of a step beyond its limits are fetched and written down for replay.

Shapes: B sequences of the step, in order of their ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megappo.algo.diagnostics import SequenceGaps
from megappo.batch.stages import Experience
from megappo.config.parity import ParityConfig, ParityLimits
from megappo.config.run import RunConfig
from megappo.controller.parity_dump import describe_sequence, write_dump
from megappo.controller.ports import SequenceInfo
from megappo.errors import ParityError
from megappo.observability.logging import get_logger
from megappo.observability.metrics import Metrics

logger = get_logger(__name__)

_AREA = "actor/rollout_log_prob_diff/"

Fetch = Callable[[list[int]], Experience]
"""Brings some sequences, by id, to the controller."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ParitySink:
    """Where the monitor writes and whom it tells."""

    folder: Path | None = None
    """Of the dumps; None: nothing is written."""
    warn: Callable[[str], None] = logger.warning
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids -> text, for the dumps."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepComparison:
    """What the comparison of one step found, per sequence."""

    step: int
    version: int
    """Of the weights that the trainer compared with."""
    sequences: Sequence[SequenceInfo]
    """[B]."""
    gaps: SequenceGaps
    """[B] per field."""
    pearson_r: float | None
    """Correlation of the probabilities."""

    @property
    def mean(self) -> float:
        """Mean difference over the compared tokens, in nats."""
        return float(self.gaps.total.sum()) / int(self.gaps.tokens.sum())

    @property
    def largest(self) -> float:
        """Largest difference of a compared token, in nats."""
        return float(self.gaps.largest.max())

    def worst(self, count: int, *, by_mean: bool) -> list[int]:
        """Return positions of the sequences with the largest mean difference, or the largest one of a token."""
        means = self.gaps.total / np.maximum(self.gaps.tokens, 1)
        # A difference that is not finite is the worst of all; sequences without a compared token are none.
        keys = np.nan_to_num(means if by_mean else self.gaps.largest, nan=np.inf)
        order = np.argsort(np.where(self.gaps.tokens > 0, -keys, np.inf), kind="stable")
        return order[: min(count, int((self.gaps.tokens > 0).sum()))].tolist()


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


def check_parity(comparison: StepComparison, config: RunConfig, sink: ParitySink, fetch: Fetch) -> None:
    """Hold one step against the limits: warn in one line, or end the run, with the worst sequences written down.

    Raises:
        ParityError: a limit of `rollout.parity.stop` is exceeded.
    """
    parity = config.rollout.parity
    broken, stops = _judge(parity, mean=comparison.mean, largest=comparison.largest)
    if not broken:
        return
    worst = comparison.worst(max(parity.dump, 1), by_mean=".mean" in broken[0])
    place = _dump(comparison, worst[: parity.dump], config, sink, fetch, reasons=broken, sparing=not stops)
    numbers = _numbers(comparison)
    if stops:
        names = [describe_sequence(comparison.sequences[row], comparison.gaps, row) for row in worst]
        raise ParityError(_explain(comparison.step, broken, numbers, names, place, config))
    info = comparison.sequences[worst[0]]
    of_worst = f"worst: sequence {info.sequence_id} (row {info.row})"
    sink.warn(_warning(comparison.step, broken, numbers, of_worst, place))


def check_update(metrics: Metrics, *, step: int, all_current: bool, config: RunConfig, sink: ParitySink) -> Metrics:
    """Hold the difference that the update's first step measured against the limits, where no pass before it did.

    Args:
        metrics: of the update.
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
    place = "no dump: the update keeps no log-probs (algorithm.old_log_probs=recompute does)"
    if stops:
        raise ParityError(_explain(step, broken, numbers, [], place, config))
    if broken:
        sink.warn(_warning(step, broken, numbers, place))
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
    total = sum(info.response_tokens for info in comparison.sequences)
    correlation = "" if comparison.pearson_r is None else f", r {comparison.pearson_r:.4f}"
    share = "" if compared == total else f" (of {total:,}; older weights sampled the others)"
    return (
        f"mean {comparison.mean:.3g}, max {comparison.largest:.3g} nats{correlation} over {compared:,} response tokens"
        f"{share}"
    )


def _dump(
    comparison: StepComparison,
    rows: Sequence[int],
    config: RunConfig,
    sink: ParitySink,
    fetch: Fetch,
    *,
    reasons: Sequence[str],
    sparing: bool,
) -> str:
    """Write the sequences at some positions down; returns where, or why not. `sparing`: heed dump_files."""
    parity = config.rollout.parity
    if not rows or sink.folder is None:
        return "no dump: rollout.parity.dump=0" if sink.folder is not None else "no dump: the run has no folder"
    if sparing and len(list(sink.folder.glob("step_*.json"))) >= parity.dump_files:
        return f"no dump: rollout.parity.dump_files={parity.dump_files} are in {sink.folder}"
    left, whole = parity.dump_tokens, list[int]()
    for row in rows:
        if comparison.sequences[row].length <= left:
            whole.append(row)
            left -= comparison.sequences[row].length
    fetched = fetch([comparison.sequences[row].sequence_id for row in whole]) if whole else None
    about = {
        "step": comparison.step,
        "reasons": list(reasons),
        "trainer_version": comparison.version,
        "mean": comparison.mean,
        "max": comparison.largest,
        "pearson_r": comparison.pearson_r,
        "compared_tokens": int(comparison.gaps.tokens.sum()),
        "model": config.model.path,
        "dtype": config.model.dtype.value,
        "engine": config.rollout.engine,
        "engine_dtype": config.rollout.weight_dtype(config.model).value,
        "temperature": config.rollout.sampling.temperature,
    }
    path = sink.folder / f"step_{comparison.step:06d}.json"
    infos = [comparison.sequences[row] for row in rows]
    write_dump(path, about, infos, fetched, decode=sink.decode)
    return str(path)


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
            f"dump: {place}" if place.endswith(".json") else place,
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
