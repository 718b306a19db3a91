"""Where metrics go, and which steps are recorded for replay."""

from dataclasses import dataclass, field
from enum import Enum


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Trackers besides metrics.jsonl, which is always written. A tracker that is away costs a run nothing: what it
    misses is sent when it answers again, when the run is resumed, or by `megappo track RUN`."""

    trackers: list[str] = field(default_factory=lambda: ["mlflow"])
    """Any of mlflow, tensorboard and `package.module:name`; []: none."""
    mlflow_uri: str | None = None
    """None: sqlite file `<run.dir>/<run.name>/mlflow.db`."""
    experiment: str = "megappo"
    """The experiment of MLflow that runs belong to."""
    close_timeout_s: float = 30.0
    """Longest time that the end of a run waits for trackers, all of them together; after Ctrl-C 2 s at most."""


class RecordTrigger(Enum):
    """What makes a step worth a record."""

    non_finite = "non_finite"
    """A metric of the passes or the update is NaN or infinite, or an optimizer step was skipped."""
    parity = "parity"
    """Engine and trainer differ by more than `rollout.parity` warns of or stops at."""


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """Steps written down whole, to `<run>/records/step_000012/`, for `megappo replay`. Off by default."""

    steps: list[int] = field(default_factory=list[int])
    """Steps to record, such as [3, 7]."""
    when: list[RecordTrigger] = field(default_factory=list[RecordTrigger])
    """Also record steps in which this happens."""
    max_records: int = 5
    """Most records that `when` makes in one run."""
    weights: bool = False
    """Write the weights before the update into the record, too, as Hugging Face folders. A step of which only the
    update tells that it is to be recorded has none. Without: the record names the checkpoint of the step before."""
