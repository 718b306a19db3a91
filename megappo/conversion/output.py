"""Where a tool writes: a folder beside its place, which gets its name when it is whole."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megappo import __version__
from megappo.device.together import run_together
from megappo.errors import CheckpointError, StorageError
from megappo.weights.buckets import BucketMeta
from megappo.weights.safetensors_io import finish_folder, name_folder, partial_folder, start_folder

_MARK = "conversion.json"
"""Says what made a folder and of what, and that it may be made again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Output:
    """A folder that a tool makes."""

    path: Path
    made_by: str
    """The command."""
    source: Path
    """What it is made of."""
    overwrite: bool = False
    """Replace what an earlier conversion wrote there."""

    @property
    def aside(self) -> Path:
        """Where it is written."""
        return partial_folder(self.path)

    def check(self, num_bytes: int) -> None:
        """Refuse what cannot work before anything is written.

        Raises:
            CheckpointError: something is there that no conversion wrote, it is a part of the source, or the disk has
                less than `num_bytes` left.
        """
        target, source = self.path.resolve(), self.source.resolve()
        if target == source or source in target.parents or target in source.parents:
            raise CheckpointError(f"--out {self.path} and {self.source} overlap (choose another folder)")
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            if not (self.path / _MARK).is_file():
                raise CheckpointError(
                    f"--out {self.path} exists and was not written by a conversion (choose another folder)"
                )
            if not self.overwrite:
                raise CheckpointError(f"--out {self.path} exists (give --overwrite to replace it, or another folder)")
        existing = next(path for path in [target, *target.parents] if path.exists())
        free = shutil.disk_usage(existing).free
        if free < num_bytes:
            raise StorageError(
                f"--out {self.path} needs {num_bytes / 1e9:,.2f} GB, {existing} has {free / 1e9:,.2f} GB left"
            )

    @contextmanager
    def written(self) -> Iterator[None]:
        """Make the empty folder beside its place, and remove it at the end, if it has no name by then; all processes
        enter. Raises CheckpointError, also where another process is writing the same folder."""
        with ExitStack() as held:
            run_together(lambda: self._start(held) if dist.get_rank() == 0 else None)
            yield

    def _start(self, held: ExitStack) -> None:
        """Make the folder; leaving `held` removes it. A lock tells one being written from what a kill left."""
        with ExitStack() as before:
            try:
                self.aside.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{self.aside} cannot be made: {error}") from error
            self._lock(before)
            start_folder(self.path)
            self._lock(held)
        held.callback(shutil.rmtree, self.aside, ignore_errors=True)

    def _lock(self, held: ExitStack) -> None:
        """Lock the folder until `held` is left; the system does so at the end of the process, too."""
        try:
            folder = os.open(self.aside, os.O_RDONLY)
            held.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            raise StorageError(
                f"--out {self.path} is being written by another process (wait for it, or choose another folder)"
            ) from None
        except OSError:
            return  # a file system without locks

    def finish(
        self,
        *,
        side: Path | None,
        config_changes: Mapping[str, object] | None = None,
        buckets: Sequence[BucketMeta] = (),
    ) -> None:
        """Add the files of `side` that are no weights, and give the folder its name; one process calls it.

        Args:
            side: a Hugging Face folder of the same model; None: the folder has all of its files.
            config_changes: keys of its config.json that become others.
            buckets: what each weight file holds, where they are a Hugging Face model.

        Raises:
            CheckpointError: a file cannot be written. What had the name before is still there.
        """
        mark = {"made_by": self.made_by, "version": __version__, "source": str(self.source.resolve())}
        self.write(_MARK, json.dumps(mark, indent=2) + "\n")
        if side is None:
            name_folder(self.path)
        else:
            finish_folder(self.path, source=side, buckets=buckets, config_changes=config_changes or {})

    def write(self, name: str, text: str) -> None:
        """Write one small file. Raises CheckpointError."""
        try:
            (self.aside / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error}") from error
