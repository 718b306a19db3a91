"""The folder `rollouts/` of a checkpoint: what was sampled and no step has trained on, with its tokens.

- `waiting.json`: complete groups that wait, and the rollouts of the next step where they are sampled already
  (`controller=one_step_off`); metadata, scores, metrics and the texts that the rollout log will show.
- `tokens_00000.npz`, ...: their tokens, a RolloutBatch per file.
- `begun.npz`: unfinished answers of `rollout.partial`, a BegunBatch.
- `step.json`: the finished step of the checkpoint as the observer is told of it. A run that was killed after the
  checkpoint and before that line of metrics.jsonl writes the line when it is resumed.

Numbers come back bitwise: JSON holds floats as Python prints them, arrays keep their types. Nothing is pickled.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megappo.batch.fields import PackedBatch, arrays_of, concat, empty
from megappo.batch.stages import BegunBatch, RolloutBatch
from megappo.checkpoint.reading import read_arrays, read_object, readable
from megappo.controller.ports import HeldRollouts, SequenceInfo
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.sampling import StepRollouts
from megappo.observability.metrics import Metrics, pack, unpack
from megappo.observability.run_directory import write_atomically, write_file
from megappo.rewards.types import Reward, Sample

_SEQUENCES_PER_FILE = 4096
"""Tokens pass through the driver, so many sequences at a time."""

Packed = TypeVar("Packed", bound=PackedBatch)
Json = dict[str, Any]  # Any: what JSON holds


@dataclass(kw_only=True, slots=True, frozen=True)
class FinishedStep:
    """What a step leaves behind before its weights are handed over."""

    metrics: Metrics
    trained: ScoredRollouts


@dataclass(kw_only=True, slots=True, frozen=True)
class WaitingRollouts:
    """Everything sampled that no step has trained on."""

    carried: ScoredRollouts
    unfinished: Sequence[int]
    """Ids of the sequences of unfinished groups."""
    next_step: StepRollouts | None
    """What the next step trains on, if it is sampled already."""

    @property
    def complete(self) -> list[int]:
        """Ids of the complete sequences."""
        parts = [self.carried] if self.next_step is None else [self.carried, self.next_step.train]
        return sorted(info.sequence_id for part in parts for info in part.sequences)


def write_rollouts(
    folder: Path,
    waiting: WaitingRollouts,
    step: FinishedStep | None,
    *,
    read: Callable[[Sequence[int]], HeldRollouts],
) -> None:
    """Write the files into `folder`, which is made.

    Args:
        step: the finished step; None before the first.
        read: as `RolloutClient.read`.

    Raises:
        OSError: the disk refuses.
        EngineError: tokens are lost.
    """
    folder.mkdir()
    ahead = waiting.next_step
    about: Json = {"carried": _pack_scored(waiting.carried), "next_step": None if ahead is None else _pack_ahead(ahead)}
    write_atomically(folder / "waiting.json", json.dumps(about))
    if step is not None:
        about = {"metrics": pack(step.metrics), "trained": _pack_scored(step.trained)}
        write_atomically(folder / "step.json", json.dumps(about))
    for number, start in enumerate(range(0, len(waiting.complete), _SEQUENCES_PER_FILE)):
        held = read(waiting.complete[start : start + _SEQUENCES_PER_FILE])
        _write_batch(folder / f"tokens_{number:05d}.npz", held.complete)
    if waiting.unfinished:
        _write_batch(folder / "begun.npz", read(waiting.unfinished).begun)


def read_rollouts(folder: Path) -> tuple[ScoredRollouts, StepRollouts | None, HeldRollouts]:
    """Return the groups that wait, what the next step trains on, and the tokens for the engines.

    Raises:
        CheckpointError: a file cannot be read.
    """
    waiting = folder / "waiting.json"
    with readable(waiting):
        about = read_object(waiting)
        ahead = about["next_step"]
        carried, next_step = _open_scored(about["carried"]), None if ahead is None else _open_ahead(ahead)
    batches = [_read_batch(path, RolloutBatch) for path in sorted(folder.glob("tokens_*.npz"))]
    begun = folder / "begun.npz"
    held = HeldRollouts(
        complete=concat(batches or [empty(RolloutBatch)]),
        begun=_read_batch(begun, BegunBatch) if begun.exists() else empty(BegunBatch),
    )
    return carried, next_step, held


def read_step(folder: Path) -> FinishedStep | None:
    """Return the finished step of the checkpoint, None before the first. Raises CheckpointError as `read_rollouts`."""
    path = folder / "step.json"
    if not path.exists():
        return None
    with readable(path):
        about = read_object(path)
        return FinishedStep(metrics=unpack(about["metrics"]), trained=_open_scored(about["trained"]))


def _write_batch(path: Path, batch: PackedBatch) -> None:
    arrays = arrays_of(batch)
    write_file(path, lambda file: np.savez(file, allow_pickle=False, **arrays))


def _read_batch(path: Path, batch_type: type[Packed]) -> Packed:
    with readable(path):
        batch = batch_type(**read_arrays(path))
        batch.validate()
        return batch


def _pack_scored(rollouts: ScoredRollouts) -> Json:
    return {
        "sequences": [info._asdict() for info in rollouts.sequences],
        "rewards": [[float(reward.score), _floats(reward.parts), reward.failure] for reward in rollouts.rewards],
        # Without extra columns of the data row, which only rewards read.
        "samples": {key: asdict(replace(sample, extra={})) for key, sample in rollouts.samples.items()},
        "greedy_scores": _floats(rollouts.greedy_scores),
    }


def _floats(numbers: Mapping[Any, float]) -> Json:
    """Return plain floats: a reward may give any kind of number."""
    return {str(key): float(value) for key, value in numbers.items()}


def _open_scored(packed: Json) -> ScoredRollouts:
    return ScoredRollouts(
        sequences=[SequenceInfo(**info) for info in packed["sequences"]],
        rewards=[Reward(score=score, parts=parts, failure=failure) for score, parts, failure in packed["rewards"]],
        samples={int(key): Sample(**sample) for key, sample in packed["samples"].items()},
        greedy_scores={int(key): score for key, score in packed["greedy_scores"].items()},
    )


def _pack_ahead(rollouts: StepRollouts) -> Json:
    return {"train": _pack_scored(rollouts.train), "metrics": pack(rollouts.metrics)}


def _open_ahead(packed: Json) -> StepRollouts:
    # The engines of a resumed run hold nothing that is to be forgotten.
    return StepRollouts(train=_open_scored(packed["train"]), forget=[], metrics=unpack(packed["metrics"]))
