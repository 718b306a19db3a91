"""How checkpoints are written, which are kept, and what a damaged one means."""

import re
from dataclasses import dataclass
from enum import Enum


class BestMode(Enum):
    """Which value of `keep_best` is the best."""

    max = "max"
    min = "min"


class OnDamaged(Enum):
    """What `trainer.resume=auto` does when the newest checkpoint is damaged."""

    previous = "previous"
    """Say what is wrong with it and go on from the newest one that is whole."""
    refuse = "refuse"
    """End with what is wrong with it."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Keys of checkpoints. They are made by `trainer.save_freq`, and by `save_before_deadline`."""

    asynchronous: bool = False
    """Copy the state and write the files while training goes on: at most one save is under way."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Also keep those of every so many steps, a multiple of trainer.save_freq; null: none."""
    keep_best: str | None = None
    """Also keep the one whose step has the best value of this metric, for example val/reward/mean; null: none."""
    best_mode: BestMode = BestMode.max
    """Whether the largest value of `keep_best` is the best, or the smallest."""
    on_damaged: OnDamaged = OnDamaged.previous
    on_signal_s: float = 60.0
    """Seconds after SIGTERM or SIGUSR1 (Slurm's warning) for the step under way and a checkpoint of it; a run that
    needs longer ends without. Give less than the scheduler leaves. 0: a signal ends the run at once, without a save."""
    save_before_deadline: str | None = None
    """Run time, HH:MM:SS, by which the run has saved and ended by itself: it stops before a step that, by the time the
    ones before took, would not be done and saved by then. Null: no limit."""


def deadline_seconds(text: str) -> int | None:
    """Return the seconds of HH:MM:SS, or None when `text` is no such time above 0."""
    found = re.fullmatch(r"(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if found is None:
        return None
    hours, minutes, seconds = map(int, found.groups())
    return 3600 * hours + 60 * minutes + seconds or None
