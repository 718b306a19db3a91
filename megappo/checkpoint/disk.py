"""Writes that are still there after a power cut, and what is said when a disk refuses.

A file or a rename is safe once the file and then its folder were flushed (fsync), in this order.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megappo.errors import StorageError
from megappo.observability.run_directory import write_atomically

_REMEDIES = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints (checkpoint.keep_last)",
    errno.EDQUOT: "free some of the quota, or keep fewer checkpoints (checkpoint.keep_last)",
    errno.EFBIG: "raise the largest size of a file there",
    errno.EACCES: "give the user of the run permission to write there",
    errno.EPERM: "give the user of the run permission to write there",
    errno.EROFS: "choose a run.dir that can be written",
    errno.ENOENT: "something removed it meanwhile: only the run itself may write there",
    errno.ESTALE: "something removed it meanwhile: only the run itself may write there",
    errno.EIO: "the disk or its connection fails",
}
_FOLDERS_NEED_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP)
"""What file systems say that cannot flush a folder."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the operating system refuses into a StorageError that says what failed, why, and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "look at the file system")
        where = f" ({error.filename})" if error.filename else ""
        raise StorageError(f"{what}: {error.strerror or error}{where} ({remedy})") from error


def flush_file(path: Path) -> None:
    """Wait until a file is on the disk. Raises OSError."""
    _flush(path, os.O_RDONLY)


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    try:
        _flush(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _FOLDERS_NEED_NO_FLUSH:
            raise


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush every file below a folder, then its folders, the innermost first. Raises OSError."""
    for path, _, files in os.walk(folder, topdown=False, onerror=_raise):
        for name in files:
            flush_file(Path(path, name))
        flush_folder(Path(path))


def files_below(folder: Path) -> list[Path]:
    """Return every file below a folder, sorted. Raises OSError."""
    walk = os.walk(folder, onerror=_raise)
    return sorted(Path(path, name) for path, _, names in walk for name in names)


def _raise(error: OSError) -> None:
    raise error


def rename(path: Path, target: Path) -> None:
    """Rename for good. Raises OSError."""
    path.rename(target)
    flush_folder(target.parent)


def replace_file(path: Path, text: str) -> None:
    """Replace a file by `text` for good; at any moment it has the old content or the new. Raises OSError."""
    write_atomically(path, text)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a whole folder. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
