"""Begun groups in two forms: responses, as engines take and give them, and packed, as a checkpoint keeps them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby

import numpy as np

from megappo.batch.fields import offsets_of
from megappo.batch.stages import BegunBatch
from megappo.rollout.engine import FinishReason, SampledResponse, Turn, VersionSpan

_ENDS = [FinishReason.abort, FinishReason.stop, FinishReason.length]
"""By their number in `BegunBatch.ends` and, on the last token of a call, in `BegunBatch.marks`."""
_OBSERVED = len(_ENDS)
"""In `BegunBatch.marks`."""


def pack_begun(groups: Mapping[int, tuple[Sequence[int], Sequence[SampledResponse]]]) -> BegunBatch:
    """Return begun groups, given as group id -> (sequence ids, responses), in order of their ids.

    What a rollout program noted of a response that it has finished is left out: the program says it again.
    """
    rows = [
        (group_id, sequence_id, response)
        for group_id, (sequence_ids, responses) in sorted(groups.items())
        for sequence_id, response in zip(sequence_ids, responses, strict=True)
    ]
    responses = [response for _, _, response in rows]
    programs = any(response.turns is not None for response in responses)
    batch = BegunBatch(
        offsets=offsets_of([len(response.tokens) for response in responses]),
        tokens=np.array([token for response in responses for token in response.tokens], dtype=np.int32),
        log_probs=np.array([value for response in responses for value in response.log_probs], dtype=np.float64),
        versions=np.array([version for response in responses for version in _versions(response)], dtype=np.int64),
        sequence_ids=np.array([sequence_id for _, sequence_id, _ in rows], dtype=np.int64),
        group_ids=np.array([group_id for group_id, _, _ in rows], dtype=np.int64),
        ends=np.array([_ENDS.index(response.finish_reason) for response in responses], dtype=np.int8),
        marks=np.array([mark for response in responses for mark in _marks(response)], np.int8) if programs else None,
        seconds=np.array([response.seconds for response in responses], np.float64) if programs else None,
    )
    batch.validate()
    return batch


def open_begun(batch: BegunBatch) -> dict[int, tuple[list[int], list[SampledResponse]]]:
    """Return what `pack_begun` packed."""
    groups: dict[int, tuple[list[int], list[SampledResponse]]] = {}
    for row in range(batch.num_sequences):
        inside = slice(batch.offsets[row], batch.offsets[row + 1])
        ids, responses = groups.setdefault(int(batch.group_ids[row]), ([], []))
        ids.append(int(batch.sequence_ids[row]))
        marks = None if batch.marks is None else batch.marks[inside]
        versions = batch.versions[inside] if marks is None else batch.versions[inside][marks != _OBSERVED]
        responses.append(
            SampledResponse(
                tokens=batch.tokens[inside].tolist(),
                log_probs=batch.log_probs[inside].tolist(),
                finish_reason=_ENDS[batch.ends[row]],
                versions=_spans(versions.tolist()),
                turns=None if marks is None else _turns(marks.tolist()),
                seconds=0.0 if batch.seconds is None else float(batch.seconds[row]),
            )
        )
    return groups


def _versions(response: SampledResponse) -> Iterable[int]:
    """Yield the version of each token."""
    versions = chain.from_iterable([span.version] * span.tokens for span in response.versions)
    return (next(versions) if sampled else 0 for sampled in response.mask)


def _spans(versions: Sequence[int]) -> list[VersionSpan]:
    return [VersionSpan(version=version, tokens=len(list(same))) for version, same in groupby(versions)]


def _marks(response: SampledResponse) -> list[int]:
    """Return the mark of each token."""
    marks: list[int] = []
    for turn in response.calls:
        marks += [_OBSERVED] * turn.observed + [0] * turn.sampled
        if turn.sampled:
            marks[-1] = _ENDS.index(turn.finish_reason)
    return marks


def _turns(marks: Sequence[int]) -> list[Turn]:
    """Return the calls that the marks of a response tell of. One that had not sampled anything is there where the
    program had put tokens before it."""
    turns: list[Turn] = []
    observed = sampled = 0
    for mark in marks:
        if mark == _OBSERVED:
            observed += 1
            continue
        sampled += 1
        if mark:
            turns.append(Turn(observed=observed, sampled=sampled, finish_reason=_ENDS[mark]))
            observed = sampled = 0
    if observed or sampled:
        turns.append(Turn(observed=observed, sampled=sampled, finish_reason=FinishReason.abort))
    return turns
