"""The loop: how long, what to save, when to validate."""

from dataclasses import dataclass
from enum import Enum


class ControllerKind(Enum):
    """The order of the loop."""

    synchronous = "synchronous"
    """Sample, train, hand over: every step trains on what the newest weights sampled."""
    one_step_off = "one_step_off"
    """Engines sample the next step while this one trains, so rollouts are one version old. On the command line
    `controller=one_step_off` also switches on the correction for that (configs/controller/one_step_off.yaml)."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Keys of the training loop; all frequencies are in steps."""

    total_epochs: int = 1
    """Passes over the prompts when total_steps is null."""
    total_steps: int | None = None
    """Steps to run (positive); null: total_epochs decide."""
    save_freq: int = -1
    """Save a checkpoint every so many steps and at the end; -1: never."""
    export_hf_freq: int = -1
    """Write the actor as a Hugging Face folder, hf/step_000040/ of the run, every so many steps and at the end;
    -1: never."""
    test_freq: int = -1
    """Validate every so many steps and at the end; -1: never."""
    val_before_train: bool = False
    critic_warmup: int = 0
    """Steps in which only the critic is updated."""
    resume: str = "never"
    """auto (the newest checkpoint of this run, if any), never, or the path of a checkpoint."""
    num_rollout_samples: int = 8
    """Sampled sequences written to rollouts/ each step."""


@dataclass(kw_only=True, slots=True)
class RunSection:
    """Where a run lives: `<dir>/<name>/`."""

    name: str = "run"
    dir: str = "runs"
