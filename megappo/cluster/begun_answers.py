"""Begun groups in two forms: responses, as engines take and give them, and packed, as a checkpoint keeps them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from megappo.batch.fields import offsets_of
from megappo.batch.stages import BegunBatch
from megappo.rollout.engine import FinishReason, SampledResponse, VersionSpan

_ENDS = [FinishReason.abort, FinishReason.stop, FinishReason.length]
"""By their number in `BegunBatch.ends`."""


def pack_begun(groups: Mapping[int, tuple[Sequence[int], Sequence[SampledResponse]]]) -> BegunBatch:
    """Return begun groups, given as group id -> (sequence ids, responses), in order of their ids."""
    rows = [
        (group_id, sequence_id, response)
        for group_id, (sequence_ids, responses) in sorted(groups.items())
        for sequence_id, response in zip(sequence_ids, responses, strict=True)
    ]
    responses = [response for _, _, response in rows]
    batch = BegunBatch(
        offsets=offsets_of([len(response.tokens) for response in responses]),
        tokens=np.array([token for response in responses for token in response.tokens], dtype=np.int32),
        log_probs=np.array([value for response in responses for value in response.log_probs], dtype=np.float64),
        versions=np.array([version for response in responses for version in _versions(response)], dtype=np.int64),
        sequence_ids=np.array([sequence_id for _, sequence_id, _ in rows], dtype=np.int64),
        group_ids=np.array([group_id for group_id, _, _ in rows], dtype=np.int64),
        ends=np.array([_ENDS.index(response.finish_reason) for response in responses], dtype=np.int8),
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
        responses.append(
            SampledResponse(
                tokens=batch.tokens[inside].tolist(),
                log_probs=batch.log_probs[inside].tolist(),
                finish_reason=_ENDS[batch.ends[row]],
                versions=_spans(batch.versions[inside].tolist()),
            )
        )
    return groups


def _versions(response: SampledResponse) -> Iterable[int]:
    """Yield the version of each token."""
    for span in response.versions:
        yield from [span.version] * span.tokens


def _spans(versions: Sequence[int]) -> list[VersionSpan]:
    return [VersionSpan(version=version, tokens=len(list(same))) for version, same in groupby(versions)]
