"""Before any process starts: the folder of a run, the checkpoint that it goes on from, and whether that fits it."""

from collections.abc import Callable
from pathlib import Path

import yaml

from megappo.checkpoint.differences import Difference, Verdict, compare_configs, read_config
from megappo.checkpoint.health import Found, checkpoint_at, checkpoint_to_resume, whole_before
from megappo.checkpoint.reading import read_object
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import OnDamaged
from megappo.config.run import RunConfig
from megappo.errors import ConfigError, Violation
from megappo.observability.run_directory import RunDirectory, open_run_directory
from megappo.observability.tracker import last_line
from megappo.observability.versions import VERSIONS_FILE, package_versions

Note = Callable[[str], None]


def open_run(
    config: RunConfig, stored: str, note: Note, *, section: str | None = None
) -> tuple[RunDirectory, Found | None]:
    """Make the folder of a run or go on in it, and return it with the checkpoint that `trainer.resume` asks for.

    Args:
        stored: the configuration as resolved YAML.
        note: told what a person should know.
        section: of a command of supervised training, such as `sft`; None: `megappo train`.

    Raises:
        CheckpointError: there is no whole checkpoint where there must be one.
        ConfigError: the configuration does not fit the checkpoint; names every key.
        MegappoError: the folder belongs to a run that is still going, or cannot be written.
    """
    resume = config.trainer.resume
    if resume not in ("auto", "never"):
        _refuse_misfits(checkpoint_at(Path(resume)), stored, section)  # before anything is moved for it
    directory = open_run_directory(config.run, resume=resume)
    if directory.moved_aside is not None:
        note(f"the earlier run of this name is now in {directory.moved_aside}")
    for line in CheckpointStore(directory.checkpoints).clean():
        note(line)
    found = checkpoint_to_resume(resume, directory.checkpoints, config.checkpoint.on_damaged)
    if found is not None:
        for line in found.notes:
            note(line)
        for difference in _refuse_misfits(found, stored, section):
            if difference.verdict is Verdict.allowed:
                note(f"another configuration than the checkpoint's: {difference}")
        if others := _other_versions(found.folder / VERSIONS_FILE):
            note(f"other versions than the checkpoint's, so numbers may differ in their last bits: {others}")
    directory.summary.unlink(missing_ok=True)  # of the part before; one that is refused keeps it
    return directory, found


def earlier_checkpoint(config: RunConfig, stored: str, damaged: Path, *, section: str | None = None) -> Path | None:
    """Return the checkpoint to go on from where a rank finds that files of `damaged` have changed; None: there is none,
    or another may not be taken. `section` as for `open_run`.

    Raises:
        ConfigError: as `open_run`.
    """
    if config.trainer.resume != "auto" or config.checkpoint.on_damaged is not OnDamaged.previous:
        return None
    earlier = whole_before(damaged)
    if earlier is not None:
        _refuse_misfits(earlier, stored, section)
    return None if earlier is None else earlier.folder


def _refuse_misfits(found: Found, stored: str, section: str | None) -> list[Difference]:
    """Return the differences of the configuration to that of a checkpoint. Raises ConfigError where it does not fit."""
    differences = compare_configs(read_config(found.folder), yaml.safe_load(stored), section=section)
    refused = [
        Violation(
            key=difference.key,
            value=difference.wanted,
            rule=f"does not fit the checkpoint {found.folder}, made with {difference.saved}: {difference.reason}",
            remedy="leave it as it was, or start a new run with resume=never",
        )
        for difference in differences
        if difference.verdict is Verdict.refused
    ]
    if refused:
        raise ConfigError(refused)
    return differences


def _other_versions(path: Path) -> str:
    """Return which packages have another version than those in a checkpoint's file; nothing: none has."""
    saved, here = read_object(path) if path.exists() else {}, package_versions()
    return ", ".join(
        f"{name} {saved[name]} -> {here.get(name, 'none')}" for name in saved if saved[name] != here.get(name)
    )


def is_finished(found: Found, directory: RunDirectory, *, total_steps: int) -> bool:
    """Whether nothing is left to do: no step, and no line of metrics for the last one."""
    if found.manifest.step < total_steps:
        return False
    return not directory.holds(found.folder) or last_line(directory.metrics) >= found.manifest.step
