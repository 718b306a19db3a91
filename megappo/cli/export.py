"""`megappo export`: a Hugging Face folder of a checkpoint of a run, read while the run goes on."""

import argparse
from pathlib import Path

from megappo.checkpoint.health import read_pointer
from megappo.checkpoint.names import checkpoints_in, step_name, step_of
from megappo.cli.convert import run_form, write_checkpoint_as_hf
from megappo.errors import CheckpointError, listed
from megappo.observability.run_directory import RunDirectory


def export(parsed: argparse.Namespace) -> int:
    """Write the folder; return the exit code.

    Raises:
        CheckpointError: the run has no such checkpoint.
        ConfigError: there is no such number of processes.
    """
    run = RunDirectory(path=parsed.run)
    step = _newest_step(run) if parsed.step is None else parsed.step
    checkpoint = _checkpoint_of(run, step)
    out = parsed.out or run.exports / step_name(step)
    return run_form(write_checkpoint_as_hf, argparse.Namespace(**vars(parsed) | {"checkpoint": checkpoint, "out": out}))


def _newest_step(run: RunDirectory) -> int:
    step = step_of(read_pointer(run.checkpoints) or "")
    if step is None:
        raise CheckpointError(f"{run.path} names no newest checkpoint ({_saved(run)})")
    return step


def _checkpoint_of(run: RunDirectory, step: int) -> Path:
    """Return the folder of a step, which has its name only once it is whole."""
    folder = run.checkpoints / step_name(step)
    if not folder.is_dir():
        raise CheckpointError(f"{run.path} has no checkpoint of step {step} ({_saved(run)})")
    return folder


def _saved(run: RunDirectory) -> str:
    names = [path.name for path in checkpoints_in(run.checkpoints).values()] if run.checkpoints.is_dir() else []
    return f"it has {listed(names)}" if names else "it has none: set trainer.save_freq"
