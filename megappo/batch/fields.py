"""Fields of packed stage types and the operations that follow from their declaration.

Shapes: N packed tokens, B sequences. Invariants (asserted by tests/batch/test_fields.py):
1. concat(select(batch, parts)) over any partition of the sequences is a permutation of the batch, bitwise.
2. `offsets` starts at 0, never falls and ends at N; every per-token field has N rows, every per-sequence field B.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from megappo.errors import MegappoError


class BatchError(MegappoError):
    """A packed batch is inconsistent; names the field, its shape and the shape it should have."""


class Dims(Enum):
    """What a field runs over."""

    tokens = "N"
    sequences = "B"


def per_token(dtype: str, doc: str, *, optional: bool = False) -> Any:  # Any: dataclass field specifier
    """Declare a field of shape [N] and the given numpy dtype."""
    return _declare(Dims.tokens, dtype, doc, optional)


def per_sequence(dtype: str, doc: str, *, optional: bool = False) -> Any:  # Any: dataclass field specifier
    """Declare a field of shape [B] and the given numpy dtype."""
    return _declare(Dims.sequences, dtype, doc, optional)


def _declare(dims: Dims, dtype: str, doc: str, optional: bool) -> Any:
    metadata = {"dims": dims, "dtype": np.dtype(dtype), "doc": doc}
    return field(default=None, metadata=metadata) if optional else field(metadata=metadata)


class PackedBatch:
    """Base of the stage types: B sequences in one run of N tokens. Subclasses are keyword-only dataclasses
    with a field `offsets` [B+1] and fields made by `per_token` or `per_sequence`."""

    offsets: np.ndarray

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, prompt included, [B] int64."""
        return np.diff(self.offsets)

    def validate(self) -> None:
        """Check shapes, dtypes and offsets. Raises BatchError naming the first field that is wrong."""
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise BatchError(f"{type(self).__name__}.offsets must start at 0 and never fall, got {offsets}")
        if offsets.dtype != np.int64:
            raise BatchError(f"{type(self).__name__}.offsets is {offsets.dtype}, must be int64")
        for declared, value in _declared_fields(self):
            rows = self.num_tokens if declared.metadata["dims"] is Dims.tokens else self.num_sequences
            if value.shape != (rows,) or value.dtype != declared.metadata["dtype"]:
                raise BatchError(
                    f"{type(self).__name__}.{declared.name} is {value.dtype}{list(value.shape)}, "
                    f"must be {declared.metadata['dtype']}[{rows}] ({declared.metadata['doc']})"
                )


Packed = TypeVar("Packed", bound=PackedBatch)


def _declared_fields(batch: PackedBatch) -> list[tuple[Field[Any], np.ndarray]]:
    """Return the declared fields that are present, with their values."""
    present: list[tuple[Field[Any], np.ndarray]] = []
    for declared in fields(batch):  # type: ignore[arg-type]  # subclasses are dataclasses
        value = getattr(batch, declared.name)
        if "dims" in declared.metadata and value is not None:
            present.append((declared, value))
    return present


def arrays_of(batch: PackedBatch) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by field name, offsets included; optional fields that are absent are left out."""
    return {"offsets": batch.offsets} | {declared.name: value for declared, value in _declared_fields(batch)}


def token_index(offsets: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Return the token positions of the given sequences, in that order, int64."""
    lengths = np.diff(offsets)[sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    index = np.arange(starts[-1], dtype=np.int64)
    return index + np.repeat(offsets[:-1][sequences] - starts[:-1], lengths)


def select(batch: Packed, sequences: Sequence[int] | np.ndarray) -> Packed:
    """Return the given sequences (positions in the batch), in the given order, as a batch of their own."""
    chosen = np.asarray(sequences, dtype=np.int64)
    tokens = token_index(batch.offsets, chosen)
    changes: dict[str, np.ndarray] = {"offsets": offsets_of(batch.lengths[chosen])}
    for declared, value in _declared_fields(batch):
        changes[declared.name] = value[tokens if declared.metadata["dims"] is Dims.tokens else chosen]
    return type(batch)(**changes)


def concat(batches: Sequence[Packed]) -> Packed:
    """Return the sequences of all batches, in order. Raises BatchError when an optional field is in some only."""
    if not batches:
        raise BatchError("concat of no batches: nothing tells which fields there are")
    present = [{declared.name for declared, _ in _declared_fields(batch)} for batch in batches]
    if any(names != present[0] for names in present):
        odd = {name for names in present for name in names if not all(name in other for other in present)}
        raise BatchError(f"cannot concat {type(batches[0]).__name__}: {sorted(odd)} is present in some batches only")
    changes: dict[str, np.ndarray] = {"offsets": offsets_of(np.concatenate([batch.lengths for batch in batches]))}
    for name in present[0]:
        changes[name] = np.concatenate([getattr(batch, name) for batch in batches])
    return type(batches[0])(**changes)


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return offsets [B+1] int64 of sequences with the given lengths [B]."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


def fingerprint_of(*arrays: np.ndarray) -> str:
    """Return a digest of the bytes of arrays, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def empty(batch_type: type[Packed]) -> Packed:
    """Return a batch of no sequences (optional fields absent)."""
    declared_fields: tuple[Field[Any], ...] = fields(batch_type)  # type: ignore[arg-type]  # subclasses are dataclasses
    values = {"offsets": np.zeros(1, dtype=np.int64)}
    for declared in declared_fields:
        if "dims" in declared.metadata and declared.default is MISSING:
            values[declared.name] = np.zeros(0, dtype=declared.metadata["dtype"])
    return batch_type(**values)
