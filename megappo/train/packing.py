"""From sequences to the Megatron input of one micro-batch, and back.

Shapes: N packed tokens and B sequences of the batch, T input tokens of the micro-batch, of which a context-parallel
rank (one of R) holds T / R, n tokens that the micro-batch predicts, m of them from rows of this rank (n without context
parallelism).

The logit at input position t - 1 predicts token t, so the last token of a sequence is never an input. Sequences lie
one behind the other without padding; filler is added only where Megatron wants a certain number of tokens: a multiple
of the tensor-parallel size on each rank under sequence parallelism, a multiple of 2 R behind each sequence under
context parallelism, the same number for all micro-batches of a pass with virtual pipeline stages (which exchange
activations of one fixed shape), and at least one.

Invariants (asserted by tests/train/test_packing.py):
1. Filler is never predicted, so it reaches neither a loss nor a result.
2. Every asked token is predicted exactly once, from the row of the token before it, whatever the micro-batches.
3. A sequence of filler is no longer than the longest real one, so it costs no more attention than real tokens would.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from megappo.batch.fields import BatchError
from megappo.batch.stages import Experience, RolloutBatch, TextBatch
from megappo.models.attention import PackedSequences, pack_lengths
from megappo.models.context import WHOLE, ContextShare, held_positions
from megappo.train.context import TokenSplit, split_tokens

T = TypeVar("T", int, np.ndarray)

PackableBatch = RolloutBatch | Experience | TextBatch
"""Sequences of tokens with ids."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PackingRules:
    """What Megatron wants of the micro-batches of one pass."""

    multiple: int = 1
    """The number of input tokens that a rank gets of a micro-batch is a multiple of this."""
    equal_counts: bool = False
    """All micro-batches of a pass have the same number of input tokens."""
    share: ContextShare = WHOLE
    """Which of the tokens this rank gets."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PackedMicroBatch:
    """Input of one forward pass on this rank, and where its results belong."""

    input_ids: torch.Tensor
    """[1, T / R] int64."""
    position_ids: torch.Tensor
    """[1, T / R] int64, from 0 in each sequence."""
    packed_seq_params: PackedSequences
    """Boundaries of the whole sequences, filler included."""
    rows: torch.Tensor
    """[m] int64 input positions of this rank whose logits predict a token that was asked for."""
    targets: torch.Tensor
    """[m] int64 ids of those tokens."""
    split: TokenSplit | None
    """How the n tokens are split over context-parallel ranks; None: they are not, and m is n."""
    token_index: np.ndarray
    """[n] int64 positions of the asked tokens in the batch; those of one sequence are contiguous and in order."""
    sequence_index: np.ndarray
    """[n] int64 position of their sequence in the batch."""

    @property
    def target_offsets(self) -> np.ndarray:
        """Boundaries of the sequences among the n predicted tokens, int64; those that predict nothing are left out."""
        starts = np.flatnonzero(np.diff(self.sequence_index, prepend=-1))
        return np.append(starts, len(self.sequence_index))

    @property
    def num_tokens(self) -> int:
        """Input tokens of all context-parallel ranks, filler included (T)."""
        return len(self.packed_seq_params.restore)


def pack_micro_batches(
    batch: PackableBatch,
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
    padded_lengths = _rounded_up(input_lengths, rules.share.multiple)
    multiple = math.lcm(rules.share.multiple, rules.multiple * rules.share.size)
    counts = [_rounded_up(max(1, int(padded_lengths[sequences].sum())), multiple) for sequences in chosen]
    if rules.equal_counts:
        counts = [max(counts)] * len(counts)
    longest = max((int(padded_lengths[sequences].max(initial=rules.share.multiple)) for sequences in chosen), default=1)
    return [
        _pack(
            batch,
            sequences,
            _Lengths(real=input_lengths[sequences], padded=padded_lengths[sequences], count=count, longest=longest),
            predict=predict,
            share=rules.share,
            device=device,
        )
        for sequences, count in zip(chosen, counts)
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Lengths:
    """Input tokens of the sequences of one micro-batch."""

    real: np.ndarray
    padded: np.ndarray
    """With the filler behind each."""
    count: int
    """Of the whole micro-batch, with the sequences of filler."""
    longest: int
    """Most tokens of one sequence of filler."""

    def whole(self) -> list[int]:
        """Return the lengths of all sequences, those of filler last."""
        filler = self.count - int(self.padded.sum())
        of_filler = [self.longest] * (filler // self.longest)
        rest = [filler % self.longest] if filler % self.longest else []
        return [*self.padded[self.padded > 0].tolist(), *of_filler, *rest]


def _pack(
    batch: PackableBatch,
    sequences: np.ndarray,
    lengths: _Lengths,
    *,
    predict: np.ndarray,
    share: ContextShare,
    device: torch.device,
) -> PackedMicroBatch:
    """Pack this rank's share of `sequences` (positions in the batch), and filler up to the wanted count."""
    within = _ranges(lengths.real)  # of every real token, its position in its sequence
    source = np.repeat(batch.offsets[:-1][sequences], lengths.real) + within
    place = np.repeat(np.cumsum(lengths.padded) - lengths.padded, lengths.real) + within
    asked = np.flatnonzero(predict[source + 1])
    token_index = source[asked] + 1
    input_ids = np.zeros(lengths.count, np.int64)
    input_ids[place] = batch.tokens[source]

    whole = lengths.whole()
    packed = pack_lengths(whole, device=device, share=share)
    rows, predicted, split = place[asked], token_index, None
    if share.size > 1:
        rows, split = split_tokens(rows, whole, share=share, device=device)
        predicted = token_index[split.own.cpu().numpy()]
    return PackedMicroBatch(
        input_ids=torch.from_numpy(input_ids[held_positions(whole, share).numpy()]).to(device).unsqueeze(0),
        position_ids=packed.positions.unsqueeze(0),
        packed_seq_params=packed,
        rows=torch.from_numpy(rows).to(device),
        targets=torch.from_numpy(batch.tokens[predicted].astype(np.int64)).to(device),
        split=split,
        token_index=token_index,
        sequence_index=np.repeat(sequences, lengths.real)[asked],
    )


def _rounded_up(number: T, multiple: int) -> T:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... for each length, one behind the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


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


def _check_use(batch: PackableBatch, used: np.ndarray, predict: np.ndarray) -> None:
    """Raise BatchError when a sequence is used twice or a token without predecessor is to be predicted."""
    repeated = np.flatnonzero(np.bincount(used, minlength=batch.num_sequences) > 1)
    if len(repeated):
        raise BatchError(f"sequence ids {batch.sequence_ids[repeated].tolist()} are in more than one micro-batch")
    first = batch.offsets[used][batch.lengths[used] > 0]
    if predict[first].any():
        ids = batch.sequence_ids[used][batch.lengths[used] > 0][predict[first]].tolist()
        raise BatchError(f"sequence ids {ids} start with a response token: a prompt of at least one token is needed")
