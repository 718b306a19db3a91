"""Whether a checkpoint is whole, and which one to go on from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from megappo.checkpoint.disk import explained, files_below
from megappo.checkpoint.manifest import MANIFEST, FileRecord, Manifest, file_digest, read_manifest
from megappo.checkpoint.names import LATEST, REPLACED, checkpoints_in, step_of
from megappo.config.checkpoint import OnDamaged
from megappo.errors import CheckpointError, listed


class Checksums(Enum):
    """Which files are read to the last byte; the sizes of all are compared always."""

    none = "none"
    small = "small"
    """All but the tensors of the models, which may be terabytes: a rank compares those that it loads."""
    full = "full"

    def include(self, path: str) -> bool:
        """Whether a file of a checkpoint is read."""
        return self is Checksums.full or (self is Checksums.small and not path.endswith(_TENSORS))


_TENSORS = ".distcp"
"""Ends the names of files of tensors (Megatron's torch_dist)."""


@dataclass(kw_only=True, slots=True)
class Health:
    """What was found out about the folder of a checkpoint."""

    problems: list[str] = field(default_factory=list[str])
    """Why it cannot be used; none: it is whole."""
    notes: list[str] = field(default_factory=list[str])
    """What is odd and does no harm."""
    manifest: Manifest | None = None
    """None: it is missing or cannot be read."""

    @property
    def is_whole(self) -> bool:
        return not self.problems


def check(folder: Path, checksums: Checksums = Checksums.none) -> Health:
    """Compare a checkpoint with its manifest. Nothing is raised: what cannot be read is a problem of the checkpoint."""
    health = Health()
    try:
        health.manifest = manifest = read_manifest(folder)
        found = {path.relative_to(folder).as_posix() for path in files_below(folder)} - {MANIFEST}
    except CheckpointError as error:
        health.problems.append(str(error))
        return health
    except OSError as error:
        health.problems.append(f"{folder} cannot be read: {error}")
        return health
    for record in manifest.files:
        if (problem := file_problem(folder, record, with_checksum=checksums.include(record.path))) is not None:
            health.problems.append(problem)
    if extra := sorted(found - {record.path for record in manifest.files}):
        health.notes.append(f"not in {MANIFEST}: {listed(extra)}")
    if (named := step_of(folder.name)) is not None and named != manifest.step:
        health.notes.append(f"{folder.name} holds step {manifest.step}")
    return health


def file_problem(folder: Path, record: FileRecord, *, with_checksum: bool) -> str | None:
    """Return what is wrong with one file of a checkpoint, or None."""
    path = folder / record.path
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            return f"{record.path} has {num_bytes} bytes, {record.num_bytes} were written"
        if with_checksum and file_digest(path) != record.xxh3_128:
            return f"{record.path} has another checksum than when it was written"
    except FileNotFoundError:
        return f"{record.path} is missing"
    except OSError as error:
        return f"{record.path} cannot be read: {error}"
    return None


def model_problems(folder: Path, checksums: Checksums, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Compare the folder of one model (`step_000050/actor`) with the manifest beside it. Returns what is wrong.

    Args:
        share: (rank, processes): which files are compared, of those that the processes share.

    Raises:
        CheckpointError: there is no manifest that can be read.
    """
    rank, processes = share
    records = read_manifest(folder.parent).files_of(folder.name)
    if not records:
        return [f"the {MANIFEST} beside it names no file of it"]
    found = [
        file_problem(folder, record, with_checksum=checksums.include(record.path))
        for record in records[rank::processes]
    ]
    return [problem for problem in found if problem is not None]


def is_in_checkpoint(folder: Path) -> bool:
    """Whether the folder of a model is a part of a checkpoint, whose manifest knows its files."""
    return (folder.parent / MANIFEST).exists()


@dataclass(kw_only=True, slots=True, frozen=True)
class Found:
    """A checkpoint that a run goes on from."""

    folder: Path
    manifest: Manifest
    notes: list[str]
    """What people should know of how it was chosen, and of it."""


def newest_whole(directory: Path, on_damaged: OnDamaged) -> Found | None:
    """Return the newest whole checkpoint of a run; None: it made none.

    A whole one that is newer than what `latest` names is taken: it got its name only when everything was on the disk,
    and the run was killed before the pointer moved. Sizes of all files are compared, and the checksums of all but
    the tensors, which the ranks read.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or with `refuse` the newest is not or the pointer to
            it is damaged. A run never starts anew on its own beside checkpoints.
    """
    checkpoints = checkpoints_in(directory)
    pointer = read_pointer(directory)
    damage = _pointer_damage(directory, pointer, checkpoints)
    if not checkpoints:
        if pointer is None:
            return None
        raise CheckpointError(f"{damage[0]}, and there is no other checkpoint ({_WAYS_ON})")
    newest, damaged = _newest_of(list(checkpoints.values()))
    damage += damaged
    if newest is None:
        raise CheckpointError("\n".join([*damage, f"{directory} holds no whole checkpoint ({_WAYS_ON})"]))
    if damage and on_damaged is OnDamaged.refuse:
        remedy = f"checkpoint.on_damaged=previous goes on from {newest.folder.name}, or give one as resume=PATH"
        raise CheckpointError("\n".join([*damage, f"nothing was loaded ({remedy})"]))
    newest.notes[:0] = [*damage, *_how_chosen(newest.folder, pointer, damage)]
    return newest


def whole_before(folder: Path) -> Found | None:
    """Return the newest whole checkpoint beside `folder` that is older than it; None: there is none."""
    checkpoints = list(checkpoints_in(folder.parent).values())
    return _newest_of(checkpoints[: checkpoints.index(folder)])[0]


def _newest_of(folders: Sequence[Path]) -> tuple[Found | None, list[str]]:
    """Return the last of some checkpoints that is whole, and what is wrong with those behind it."""
    damage: list[str] = []
    for folder in reversed(folders):
        health = check(folder, Checksums.small)
        if health.is_whole:
            assert health.manifest is not None
            return Found(folder=folder, manifest=health.manifest, notes=health.notes), damage
        damage.append(f"checkpoint {folder} is damaged: {listed(health.problems)}")
    return None, damage


_WAYS_ON = "give a checkpoint as resume=PATH, or start anew with resume=never"


def _how_chosen(folder: Path, pointer: str | None, damage: Sequence[str]) -> list[str]:
    """Say which one is taken where that is not the one that the pointer names."""
    if damage:
        return [f"going on from {folder}"]
    if pointer == folder.name.removesuffix(REPLACED):
        return []
    return [f"going on from {folder}, which is whole and newer than {pointer}: the run was killed before it moved on"]


def read_pointer(directory: Path) -> str | None:
    """Return what `latest` holds; None: there is no such file. Raises CheckpointError when it cannot be read."""
    path = directory / LATEST
    with explained(f"{path} cannot be read"):
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None


def _pointer_damage(directory: Path, pointer: str | None, checkpoints: dict[int, Path]) -> list[str]:
    path = directory / LATEST
    if pointer is None:
        return [f"{directory} holds checkpoints but no {LATEST!r}"] if checkpoints else []
    step = step_of(pointer)
    if step is None:
        return [f"{path} is garbled: it holds {pointer[:40]!r}"]
    return [] if step in checkpoints else [f"{path} names {pointer}, which is not there"]


def checkpoint_at(path: Path) -> Found:
    """Return the checkpoint in a given folder.

    Raises:
        CheckpointError: it is not whole; names what is wrong and the whole ones beside it.
    """
    health = check(path, Checksums.small)
    if health.is_whole:
        assert health.manifest is not None
        return Found(folder=path, manifest=health.manifest, notes=health.notes)
    if not health.manifest and (hint := _what_it_is(path)):
        raise CheckpointError(f"{path} is no checkpoint to resume from: {hint}")
    others = [other for other in checkpoints_in(path.parent).values() if other != path and check(other).is_whole]
    remedy = f"whole ones beside it: {listed([other.name for other in others])}" if others else "give another folder"
    raise CheckpointError(f"{path} cannot be resumed from: {listed(health.problems)} ({remedy})")


def _what_it_is(path: Path) -> str | None:
    """Say what a folder is that people take for a checkpoint, and what to do with it."""
    if (path / "config.json").is_file():
        is_converted = next(path.glob(f"*{_TENSORS}"), None) is not None
        way = "`megappo convert megatron-to-hf` makes of it what model.path takes" if is_converted else "model.path=DIR"
        return f"it holds weights alone, and not where a run was (start a new run from them: {way})"
    if is_in_checkpoint(path):
        return f"it is one part of a checkpoint (give {path.parent})"
    for directory in (path, path / "checkpoints"):
        if found := checkpoints_in(directory):
            return f"it holds checkpoints (give one, the newest is {found[max(found)]})"
    return None


def checkpoint_to_resume(resume: str, directory: Path, on_damaged: OnDamaged) -> Found | None:
    """Return the checkpoint that `trainer.resume` asks for; None: start anew.

    Args:
        resume: `auto`, `never` or the path of a checkpoint, which is taken or refused whatever `on_damaged` says.
        directory: of the run's own checkpoints.

    Raises:
        CheckpointError: as `newest_whole` and `checkpoint_at`.
    """
    if resume == "never":
        return None
    return newest_whole(directory, on_damaged) if resume == "auto" else checkpoint_at(Path(resume))
