"""Finished groups as the engines give them: their texts in Ray's store."""

from collections.abc import Sequence
from typing import Any

import ray

from megappo.controller.ports import FinishedGroup, SequenceInfo
from megappo.rewards import Sample


def finished_group(number: int, samples: Sequence[Sample]) -> FinishedGroup:
    """Return a group; its sequences have the ids 10 * number and following."""
    sequences = [
        SequenceInfo(
            sequence_id=number * 10 + index,
            group_id=number,
            prompt_tokens=1,
            response_tokens=1,
            finish_reason=sample.finish_reason,
            policy_version=0,
            row=number,
        )
        for index, sample in enumerate(samples)
    ]
    ref: Any = ray.put(list(samples))
    return FinishedGroup(sequences=sequences, samples=ref)
