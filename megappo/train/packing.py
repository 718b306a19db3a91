"""From sequences to the Megatron input of one micro-batch, and back.

Shapes: N packed tokens and B sequences of the batch, T input tokens of the micro-batch, n tokens that it predicts.

The logit at input position t - 1 predicts token t, so the last token of a sequence is never an input. Sequences lie
one behind the other without padding; filler is added only where Megatron wants a certain number of tokens: a multiple
of the tensor-parallel size under sequence parallelism, the same number for all micro-batches of a pass with virtual
pipeline stages (which exchange activations of one fixed shape), and at least one.

Invariants (asserted by tests/train/test_packing.py):
1. Filler is never predicted, so it reaches neither a loss nor a result.
2. Every asked token is predicted exactly once, from the row of the token before it, whatever the micro-batches.
3. A sequence of filler is no longer than the longest real one, so it costs no more attention than real tokens would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megappo.batch.fields import BatchError
from megappo.batch.stages import Experience, RolloutBatch
from megappo.models.attention import PackedSequences, pack_lengths, position_ids


@dataclass(kw_only=True, slots=True, frozen=True)
class PackingRules:
    """What Megatron wants of the micro-batches of one pass."""

    multiple: int = 1
    """The number of input tokens of a micro-batch is a multiple of this."""
    equal_counts: bool = False
    """All micro-batches of a pass have the same number of input tokens."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedMicroBatch:
    """Input of one forward pass, and where its results belong."""

    input_ids: torch.Tensor
    """[1, T] int64."""
    position_ids: torch.Tensor
    """[1, T] int64, from 0 in each sequence."""
    packed_seq_params: PackedSequences
    """Boundaries of the sequences, filler included."""
    rows: torch.Tensor
    """[n] int64 input positions whose logits predict a token that was asked for."""
    targets: torch.Tensor
    """[n] int64 ids of those tokens."""
    token_index: np.ndarray
    """[n] int64 positions of those tokens in the batch; those of one sequence are contiguous and in order."""
    sequence_index: np.ndarray
    """[n] int64 position of their sequence in the batch."""

    @property
    def target_offsets(self) -> np.ndarray:
        """Boundaries of the sequences among the n predicted tokens, int64; those that predict nothing are left out."""
        starts = np.flatnonzero(np.diff(self.sequence_index, prepend=-1))
        return np.append(starts, len(self.sequence_index))

    @property
    def num_tokens(self) -> int:
        """Input tokens, filler included (T)."""
        return self.input_ids.shape[1]


def pack_micro_batches(
    batch: RolloutBatch | Experience,
    micro_batches: Sequence[Sequence[int]],
    *,
    predict: np.ndarray,
    rules: PackingRules,
    device: torch.device,
) -> list[PackedMicroBatch]:
    """Build the inputs of one pass.

    Args:
        micro_batches: sequence ids; an empty list becomes filler only.
        predict: [N] bool, the tokens whose prediction is asked for.

    Raises:
        BatchError: an unknown or repeated sequence id, or a token to predict that has no token before it.
    """
    chosen = [_positions_of(batch.sequence_ids, ids) for ids in micro_batches]
    _check_use(batch, np.concatenate(chosen) if chosen else np.empty(0, np.int64), predict)
    input_lengths = np.maximum(batch.lengths - 1, 0)
    counts = [max(1, int(input_lengths[sequences].sum())) for sequences in chosen]
    counts = [-(-count // rules.multiple) * rules.multiple for count in counts]
    if rules.equal_counts:
        counts = [max(counts)] * len(counts)
    longest = max((int(input_lengths[sequences].max(initial=1)) for sequences in chosen), default=1)
    return [
        _pack(batch, sequences, input_lengths[sequences], predict=predict, count=count, longest=longest, device=device)
        for sequences, count in zip(chosen, counts)
    ]


def _pack(
    batch: RolloutBatch | Experience,
    sequences: np.ndarray,
    lengths: np.ndarray,
    *,
    predict: np.ndarray,
    count: int,
    longest: int,
    device: torch.device,
) -> PackedMicroBatch:
    """Pack `sequences` (positions in the batch) with `lengths` input tokens each, and filler up to `count` tokens."""
    ends = np.cumsum(lengths)
    num_real = int(ends[-1]) if len(ends) else 0
    source = np.arange(num_real) + np.repeat(batch.offsets[:-1][sequences] - (ends - lengths), lengths)
    rows = np.flatnonzero(predict[source + 1])
    token_index = source[rows] + 1

    filler = count - num_real
    filler_lengths = np.full(-(-filler // longest), longest, np.int64)
    if filler % longest:
        filler_lengths[-1] = filler % longest
    all_lengths = [*lengths[lengths > 0].tolist(), *filler_lengths.tolist()]
    input_ids = np.zeros(count, np.int64)
    input_ids[:num_real] = batch.tokens[source]
    return PackedMicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device).unsqueeze(0),
        position_ids=position_ids(all_lengths, device=device),
        packed_seq_params=pack_lengths(all_lengths, device=device),
        rows=torch.from_numpy(rows).to(device),
        targets=torch.from_numpy(batch.tokens[token_index].astype(np.int64)).to(device),
        token_index=token_index,
        sequence_index=np.repeat(sequences, lengths)[rows],
    )


def _positions_of(sequence_ids: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """Return the positions in the batch of the wanted sequence ids. Raises BatchError for an unknown id."""
    ids = np.asarray(wanted, dtype=np.int64)
    order = np.argsort(sequence_ids)
    places = np.searchsorted(sequence_ids, ids, sorter=order)
    unknown = places >= len(order)
    unknown[~unknown] = sequence_ids[order[places[~unknown]]] != ids[~unknown]
    if unknown.any():
        raise BatchError(f"micro-batch names sequence ids {ids[unknown].tolist()}, which are not in the batch")
    return order[places]


def _check_use(batch: RolloutBatch | Experience, used: np.ndarray, predict: np.ndarray) -> None:
    """Raise BatchError when a sequence is used twice or a token without predecessor is to be predicted."""
    repeated = np.flatnonzero(np.bincount(used, minlength=batch.num_sequences) > 1)
    if len(repeated):
        raise BatchError(f"sequence ids {batch.sequence_ids[repeated].tolist()} are in more than one micro-batch")
    first = batch.offsets[used][batch.lengths[used] > 0]
    if predict[first].any():
        ids = batch.sequence_ids[used][batch.lengths[used] > 0][predict[first]].tolist()
        raise BatchError(f"sequence ids {ids} start with a response token: a prompt of at least one token is needed")
