"""The checkpoints of one run: made, moved into place, pointed to, and removed.

A checkpoint is written into a folder of its own (`begin`), gets its name by one rename when everything in it is on the
disk, and is pointed to afterwards (`commit`). What a kill leaves at any moment is an older state of these or a leftover
that nobody reads; `clean` settles it at the next start. One process uses the store, the driver of the run; ranks only
write into the folder that `begin` made.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megappo.checkpoint.disk import explained, files_below, flush_folder, flush_tree, remove, rename, replace_file
from megappo.checkpoint.health import check, file_problem, read_pointer
from megappo.checkpoint.manifest import MANIFEST, FileRecord, Manifest, record_files
from megappo.checkpoint.names import (
    DELETING,
    LATEST,
    REPLACED,
    SET_ASIDE,
    WRITING,
    checkpoints_in,
    entries,
    leftovers_in,
    step_name,
    step_of,
)
from megappo.checkpoint.retention import best_step, steps_to_delete
from megappo.checkpoint.scores import forget_scores, read_scores
from megappo.config.checkpoint import CheckpointConfig
from megappo.errors import CheckpointError, StorageError, listed

_INTACT = "older checkpoints are intact"


class CheckpointStore:
    """The folder `<run>/checkpoints`, which exists from the first save on.

    Example:
        store = CheckpointStore(Path("runs/mine/checkpoints"))
        folder = store.begin(50)
        (folder / "loop.json").write_text("{}")
        store.commit(50)
        store.prune(config.checkpoint)
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def clean(self) -> list[str]:
        """Settle what a killed run left: half written and half removed folders go, a checkpoint that was to be replaced
        gets its name back where the new one did not come. Returns what was done, for people.

        Raises:
            CheckpointError: the disk refuses.
        """
        done: list[str] = []
        with explained(f"{self.directory} cannot be cleaned"):
            for path in leftovers_in(self.directory):
                remove(path)
                done.append(f"removed {path}, which a run that was killed left unfinished")
            for path in entries(self.directory):
                if path.suffix == REPLACED:
                    self._settle_replaced(path)
        return done

    def go_on_from(self, step: int) -> list[str]:
        """Make the checkpoint of `step`, if it is of this run, the newest: the pointer names it, and newer ones are set
        aside, since the run will make those steps again. Returns what was done, for people.

        Raises:
            CheckpointError: the disk refuses.
        """
        checkpoints = checkpoints_in(self.directory)
        done: list[str] = []
        with explained(f"{self.directory} cannot go on from step {step}"):
            forget_scores(self.directory, after=step)
            if step in checkpoints and read_pointer(self.directory) != step_name(step):
                replace_file(self.directory / LATEST, step_name(step))
            for newer in sorted((found for found in checkpoints if found > step), reverse=True):
                target = _free_name(checkpoints[newer].with_name(step_name(newer) + SET_ASIDE))
                rename(checkpoints[newer], target)
                done.append(f"{step_name(newer)} is newer than what the run goes on from; it is now {target}")
        return done

    def begin(self, step: int) -> Path:
        """Return an empty folder for the files of a step.

        Raises:
            CheckpointError: the disk refuses; older checkpoints are intact.
        """
        folder = self._writing(step)
        with explained(f"checkpoint {folder} cannot be begun, {_INTACT}"):
            if not self.directory.exists():
                self.directory.mkdir(parents=True)
                flush_folder(self.directory.parent)
            if folder.exists():
                remove(folder)
            folder.mkdir()
        return folder

    def commit(
        self,
        step: int,
        records: Sequence[FileRecord] = (),
        # Any: JSON, known to the one who saves
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Make what was written since `begin` the newest checkpoint; returns its folder.

        Args:
            records: of the files that ranks wrote and read for their checksums, relative to the checkpoint
                (`actor/...`). Files without one are read here.
            extra: kept in the manifest.

        Raises:
            CheckpointError: a file is missing or has another size than its rank wrote, or the disk refuses. Older
                checkpoints and the pointer are intact; the new one is whole (only the pointer did not move) or gone.
        """
        writing = self._writing(step)
        try:
            with explained(f"checkpoint {writing} was not written, {_INTACT}"):
                manifest = _record(writing, step, records, extra or {})
                (writing / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
                flush_tree(writing)
                final = self._move_into_place(writing, step)
        except CheckpointError:
            self.abandon(step)
            raise
        with explained(f"checkpoint {final} is whole, but {LATEST!r} could not be moved to it"):
            replace_file(self.directory / LATEST, final.name)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written since `begin`, as far as the disk lets; the next start removes the rest."""
        with suppress(OSError):
            remove(self._writing(step))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first, without looking into them."""
        return list(checkpoints_in(self.directory))

    def record_score(self, step: int, metric: str, value: float) -> None:
        """Keep the value of the metric that decides which checkpoint is the best.

        Raises:
            CheckpointError: the disk refuses; older checkpoints are intact.
        """
        scores = read_scores(self.directory, metric)
        present = self.steps()
        kept = {old: number for old, number in scores.values.items() if old in present}
        with explained(f"the {metric} of step {step} was not written, {_INTACT}"):
            replace(scores, values=kept | {step: value}).write(self.directory)

    def prune(self, keep: CheckpointConfig) -> list[Path]:
        """Remove the checkpoints that nothing keeps (`retention`); returns their folders.

        Raises:
            CheckpointError: the disk refuses; the ones to be kept are intact.
        """
        checkpoints = checkpoints_in(self.directory)
        if len(checkpoints) <= keep.keep_last:
            return []
        whole = [step for step, folder in checkpoints.items() if check(folder).is_whole]
        scores = {} if keep.keep_best is None else read_scores(self.directory, keep.keep_best).values
        leaving = steps_to_delete(
            whole,
            [step for step in checkpoints if step not in whole],
            keep,
            best=best_step(scores, whole, keep.best_mode),
            pointed=step_of(read_pointer(self.directory) or ""),
        )
        for step in leaving:
            with explained(f"checkpoint {checkpoints[step]} cannot be removed, those to be kept are intact"):
                self._delete(checkpoints[step])
        return [checkpoints[step] for step in leaving]

    def _writing(self, step: int) -> Path:
        return self.directory / (step_name(step) + WRITING)

    def _move_into_place(self, writing: Path, step: int) -> Path:
        """Rename; a checkpoint of the same step keeps another name until the new one is in its place."""
        final = self.directory / step_name(step)
        replaced = final.with_name(final.name + REPLACED)
        if replaced.exists():
            self._settle_replaced(replaced)
        if final.exists():
            rename(final, replaced)
        try:
            rename(writing, final)
        finally:
            if replaced.exists():
                self._settle_replaced(replaced)
        return final

    def _settle_replaced(self, replaced: Path) -> None:
        """Give a checkpoint its name back, or remove it where a new one has it."""
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if final.exists():
            self._delete(replaced)
        else:
            rename(replaced, final)

    def _delete(self, folder: Path) -> None:
        """Take the name away first, so that what is half removed never looks like a checkpoint."""
        deleting = folder.with_name(folder.name.removesuffix(REPLACED) + DELETING)
        if deleting.exists():
            remove(deleting)
        rename(folder, deleting)
        remove(deleting)
        flush_folder(self.directory)


def _record(writing: Path, step: int, records: Sequence[FileRecord], extra: Mapping[str, Any]) -> Manifest:
    """Return the manifest of what was written. Raises OSError, and StorageError where a file is not as recorded."""
    by_path = {record.path: record for record in records}
    unrecorded = [path for path in files_below(writing) if path.relative_to(writing).as_posix() not in by_path]
    by_path |= {record.path: record for record in record_files(writing, unrecorded)}
    problems = [
        problem for record in by_path.values() if (problem := file_problem(writing, record, with_checksum=False))
    ]
    if problems:
        raise StorageError(
            f"checkpoint {writing} was not written: {listed(problems)} (all ranks must write to one file system; "
            f"{_INTACT})"
        )
    return Manifest(
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roles=sorted({record.path.partition("/")[0] for record in records}),
        files=sorted(by_path.values(), key=lambda record: record.path),
        extra=extra,
    )


def _free_name(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}_{number}")
    return candidate
