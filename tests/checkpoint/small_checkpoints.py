"""Checkpoints of a few bytes, and a disk on which operations fail at will."""

import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megappo.checkpoint.disk import explained
from megappo.checkpoint.health import Checksums, Found, check, newest_whole
from megappo.checkpoint.manifest import record_files
from megappo.checkpoint.store import CheckpointStore
from megappo.config.checkpoint import OnDamaged


def quick_folder() -> AbstractContextManager[str]:
    """A folder in memory, where there is such a file system: waiting for a disk proves nothing here."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


class Killed(BaseException):
    """The process is dead: nothing after it is done."""


_OPERATIONS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


@dataclass
class FaultyDisk:
    """Counts the operations on the file system, and fails from the `at`-th on, or (`once`) at it alone."""

    error: Callable[[], BaseException] | None = None
    at: int = sys.maxsize
    once: bool = False
    done: list[tuple[str, str]] = field(default_factory=list)
    """(operation, path) of those that were not failed."""
    count: int = 0

    @contextmanager
    def plugged_in(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "open", self._failing("open", io.open))
            for name in _OPERATIONS:
                patch.setattr(os, name, self._failing(name, getattr(os, name)))
            yield

    def _failing(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.error is not None and (self.count == self.at or (self.count > self.at and not self.once)):
                raise self.error()
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[0])
            self.done.append((name, path))
            return operation(*args, **kwargs)

        return attempt


def write(store: CheckpointStore, step: int, text: str = "") -> Path:
    """Write the files of a step as ranks and controller do, and make it a checkpoint."""
    folder = store.begin(step)
    with explained("a rank"):
        (folder / "actor").mkdir()
        (folder / "actor" / "rank_0.bin").write_bytes(f"weights of {step} {text}".encode())
        (folder / "loop.json").write_text(f'{{"step": {step}, "text": "{text}"}}')
        records = record_files(folder, [folder / "actor" / "rank_0.bin"])
    return store.commit(step, records, {"weight_version": step})


def content(found: Found) -> tuple[str, str]:
    """Return what a checkpoint holds, once every byte of it was verified."""
    assert check(found.folder, Checksums.full).problems == []
    return (found.folder / "loop.json").read_text(), (found.folder / "actor" / "rank_0.bin").read_text()


def written(step: int, text: str = "") -> tuple[str, str]:
    """Return what `write` puts into a checkpoint."""
    return f'{{"step": {step}, "text": "{text}"}}', f"weights of {step} {text}"


def found_in(directory: Path) -> tuple[str, str]:
    """Return the content of the checkpoint that a run would go on from."""
    found = newest_whole(directory, OnDamaged.previous)
    assert found is not None
    return content(found)
