"""What was computed again against what was recorded.

Shapes: N packed tokens, B sequences. Two numbers agree within a tolerance when |a - b| <= tolerance * max(1, |a|), a
being the recorded one, and when both are the same NaN or infinity.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megappo.batch.stages import Experience, TokenField
from megappo.controller.ports import SequenceInfo
from megappo.controller.record_folder import StepRecord
from megappo.observability.metrics import Metrics

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorstToken:
    """Where two numbers are furthest apart."""

    sequence_id: int
    group_id: int
    row: int
    """Of the data."""
    position: int
    """Of the token in its sequence, prompt included, from 0."""
    response_position: int
    token: int
    text: str | None
    recorded: float
    replayed: float


@dataclass(kw_only=True, slots=True, frozen=True)
class FieldDifference:
    """One quantity over the response tokens of some sequences."""

    name: str
    tokens: int
    largest: float
    """Largest |a - b|; infinite where only one of the two is finite."""
    mean: float
    agrees: bool
    """Whether every token is within the tolerance."""
    is_judged: bool
    """Whether it decides the outcome, or is there to be looked at."""
    non_finite_recorded: int
    non_finite_replayed: int
    worst: WorstToken | None
    """None: every token is equal."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NumberDifference:
    """One number of the step."""

    name: str
    recorded: float | None
    """None: the record lacks it."""
    replayed: float
    agrees: bool


def compare_field(
    record: StepRecord,
    name: str,
    recorded: np.ndarray,
    replayed: TokenField,
    *,
    tolerance: float,
    decode: Decode | None,
    sequences: np.ndarray | None = None,
) -> FieldDifference:
    """Compare a quantity [N] of the record with that of a replay, whose sequences come in any order.

    Args:
        sequences: [B] bool: only these are compared, and they decide nothing; None: all, and they do.
    """
    experience = record.experience
    ours = in_order_of(experience, replayed)
    index = np.flatnonzero(_tokens_of(experience, sequences))
    a, b = recorded[index].astype(np.float64), ours[index].astype(np.float64)
    size = _distance(a, b)
    worst = None
    if len(size) and size.max() > 0:
        place = int(size.argmax())
        worst = _worst(record, int(index[place]), float(a[place]), float(b[place]), decode)
    return FieldDifference(
        name=name,
        tokens=len(size),
        largest=float(size.max(initial=0.0)),
        mean=float(size.mean()) if len(size) else 0.0,
        agrees=bool((size <= _allowed(a, tolerance)).all()),
        is_judged=sequences is None,
        non_finite_recorded=int((~np.isfinite(a)).sum()),
        non_finite_replayed=int((~np.isfinite(b)).sum()),
        worst=worst,
    )


def compare_metrics(
    recorded: Metrics, replayed: Metrics, *, tolerance: float, names: Collection[str] | None = None
) -> list[NumberDifference]:
    """Compare metrics that a replay has.

    Args:
        names: those that can agree; None: all that the record has.
    """
    found: list[NumberDifference] = []
    for name, stat in sorted(replayed.items()):
        if stat.value is None or (names is not None and name not in names):
            continue
        known = recorded.get(name)
        before = None if known is None else known.value
        found.append(compare_number(name, before, stat.value, tolerance=tolerance))
    return found


def compare_number(name: str, recorded: float | None, replayed: float, *, tolerance: float) -> NumberDifference:
    """Compare one number; one that the record lacks agrees with anything."""
    agrees = True
    if recorded is not None:
        a, b = np.array([recorded]), np.array([replayed])
        agrees = bool((_distance(a, b) <= _allowed(a, tolerance)).all())
    return NumberDifference(name=name, recorded=recorded, replayed=replayed, agrees=agrees)


def in_order_of(experience: Experience, field: TokenField) -> np.ndarray:
    """Return the values [N] of a field in the order of the experience's sequences, which it holds in any order."""
    position = {key: index for index, key in enumerate(field.sequence_ids.tolist())}
    parts = np.split(field.values, field.offsets[1:-1])
    ordered = [parts[position[key]] for key in experience.sequence_ids.tolist()]
    return np.concatenate(ordered) if ordered else field.values


def _tokens_of(experience: Experience, sequences: np.ndarray | None) -> np.ndarray:
    mask = experience.response_mask
    return mask if sequences is None else mask & np.repeat(sequences, experience.lengths)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b|; 0 for the same NaN or infinity, infinite where only one of the two is a number."""
    with np.errstate(invalid="ignore"):
        size = np.nan_to_num(np.abs(a - b), nan=math.inf)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, size)


def _allowed(a: np.ndarray, tolerance: float) -> np.ndarray:
    return tolerance * np.maximum(1.0, np.where(np.isfinite(a), np.abs(a), 1.0))


def _worst(record: StepRecord, index: int, a: float, b: float, decode: Decode | None) -> WorstToken:
    experience = record.experience
    row = int(np.searchsorted(experience.offsets, index, side="right")) - 1
    info: SequenceInfo = record.sequences[row]
    token, start = int(experience.tokens[index]), int(experience.offsets[row])
    return WorstToken(
        sequence_id=info.sequence_id,
        group_id=info.group_id,
        row=info.row,
        position=index - start,
        response_position=int(experience.response_mask[start:index].sum()),
        token=token,
        text=None if decode is None else decode([token]),
        recorded=a,
        replayed=b,
    )
