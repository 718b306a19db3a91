"""`megappo export`: a Hugging Face folder of a checkpoint of a run, read while the run goes on."""

import argparse
from pathlib import Path

from megappo.checkpoint.health import newest_whole
from megappo.checkpoint.names import checkpoints_in, step_name
from megappo.cli.convert import run_form, write_checkpoint_as_hf
from megappo.config.checkpoint import OnDamaged
from megappo.errors import CheckpointError, listed
from megappo.observability.run_directory import RunDirectory


def export(parsed: argparse.Namespace) -> int:
    """Write the folder; return the exit code.

    Raises:
        CheckpointError: the run has no such checkpoint, or none that is whole.
        ConfigError: there is no such number of processes.
    """
    run = RunDirectory(path=parsed.run)
    step, checkpoint = _newest(run) if parsed.step is None else (parsed.step, _checkpoint_of(run, parsed.step))
    out = parsed.out or run.exports / step_name(step)
    return run_form(write_checkpoint_as_hf, argparse.Namespace(**vars(parsed) | {"checkpoint": checkpoint, "out": out}))


def _newest(run: RunDirectory) -> tuple[int, Path]:
    """Return the checkpoint that the run would be resumed from."""
    if not run.path.is_dir():
        raise CheckpointError(f"{run.path} does not exist (give the folder of a run, such as runs/NAME)")
    found = newest_whole(run.checkpoints, OnDamaged.previous)
    if found is None:
        raise CheckpointError(f"{run.path} has no checkpoint ({_saved(run)})")
    for note in found.notes:
        print(note)
    return found.manifest.step, found.folder


def _checkpoint_of(run: RunDirectory, step: int) -> Path:
    """Return the folder of a step, which has its name only once it is whole."""
    folder = checkpoints_in(run.checkpoints).get(step)
    if folder is None:
        raise CheckpointError(f"{run.path} has no checkpoint of step {step} ({_saved(run)})")
    return folder


def _saved(run: RunDirectory) -> str:
    names = [path.name for path in checkpoints_in(run.checkpoints).values()]
    return f"it has {listed(names)}" if names else "it has none: set trainer.save_freq"
