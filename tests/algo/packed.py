"""Small packed batches for the tests of megappo.algo."""

from collections.abc import Sequence

import numpy as np

from megappo.algo.masked import MaskedTokens, compact
from megappo.batch.fields import offsets_of
from megappo.batch.stages import RolloutBatch, TokenField


def make_batch(
    masks: Sequence[Sequence[int]],
    *,
    groups: Sequence[int] | None = None,
    rollout_log_probs: Sequence[Sequence[float]] | None = None,
    sequence_ids: Sequence[int] | None = None,
) -> RolloutBatch:
    """Return a batch with the given response masks; sequence i has id i unless told otherwise."""
    flat = np.array([value for mask in masks for value in mask], dtype=bool)
    rollout = flatten(rollout_log_probs) if rollout_log_probs is not None else np.zeros(len(flat))
    return RolloutBatch(
        offsets=offsets_of([len(mask) for mask in masks]),
        tokens=np.arange(len(flat), dtype=np.int32),
        response_mask=flat,
        rollout_log_probs=rollout.astype(np.float32),
        sequence_ids=np.array(range(len(masks)) if sequence_ids is None else sequence_ids, dtype=np.int64),
        group_ids=np.array(range(len(masks)) if groups is None else groups, dtype=np.int64),
    )


def flatten(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the rows as one float64 array."""
    return np.array([value for row in rows for value in row], dtype=np.float64)


def token_field(batch: RolloutBatch, rows: Sequence[Sequence[float]]) -> TokenField:
    """Return one number per token of the batch."""
    return TokenField(offsets=batch.offsets, values=flatten(rows).astype(np.float32), sequence_ids=batch.sequence_ids)


def tokens_of(masks: Sequence[Sequence[int]]) -> MaskedTokens:
    """Return the tokens on the given masks."""
    return compact(flatten(masks).astype(bool), offsets_of([len(mask) for mask in masks]))
