"""Hand-over through a model folder that trainer and engines see: safetensors shards, given their name when complete.

The folder of a run holds `version-<v>` (a whole Hugging Face folder) and VERSION.json, which names the one that was
verified last. That one stays until another has been.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from megappo.errors import CheckpointError, StorageError
from megappo.weight_sync.transport import SenderSpec
from megappo.weights.buckets import BucketMeta, open_bucket
from megappo.weights.safetensors_io import finish_folder, partial_folder, shard_files, start_folder, write_shard

_VERSION = "VERSION.json"


class DiskSender:
    """Writes each bucket into a file of its own."""

    def __init__(self, spec: SenderSpec) -> None:
        assert spec.folder is not None, "a sender that stores needs a folder"
        self._folder = spec.folder
        self._files = iter(spec.files)

    def open(self) -> None:
        """Raise CheckpointError where this process does not see the folder that the run has begun."""
        if not self._folder.is_dir():
            raise CheckpointError(
                f"{self._folder} is not there for this process (set weight_sync.folder to one that all machines see)"
            )

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        """Write one bucket."""
        write_shard(self._folder / next(self._files), open_bucket(bucket, flat.cpu()))
        return {}

    def close(self) -> None:
        """All files are closed."""


def versions_folder(configured: str | None, *, run_name: str, run_folder: Path) -> Path:
    """Return the folder of a run's versions: one of its own in `weight_sync.folder`, which runs may share."""
    return run_folder / "weights" if configured is None else Path(configured).absolute() / run_name


class VersionFolder:
    """The folder of a run's hand-overs, as the process that leads them sees it; all versions in it are the run's."""

    def __init__(self, folder: Path, *, source: Path) -> None:
        """`source` is the model folder whose config and tokenizer go along."""
        self._folder = folder
        self._source = source

    def path(self, version: int) -> Path:
        """Return the model folder of a version."""
        return self._folder / f"version-{version}"

    def files(self, num_buckets: int) -> list[str]:
        """Return the name of the file of each bucket of all sources."""
        return shard_files(num_buckets)

    def start(self, version: int) -> Path:
        """Make and return the folder into which the files of a version are written. Raises CheckpointError."""
        start_folder(self.path(version))
        return partial_folder(self.path(version))

    def finish(self, version: int, buckets: Sequence[BucketMeta], *, dtype: str) -> Path:
        """Complete the model folder of a version, now that all files are there. Raises CheckpointError."""
        finish_folder(self.path(version), source=self._source, buckets=buckets, config_changes={"dtype": dtype})
        return self.path(version)

    def keep(self, version: int) -> None:
        """Name this version as the one to use, and remove all others. Raises StorageError."""
        new = self._folder / f".{_VERSION}"
        try:
            new.write_text(json.dumps({"version": version, "folder": self.path(version).name}) + "\n", encoding="utf-8")
            os.replace(new, self._folder / _VERSION)
        except OSError as error:
            raise StorageError(f"{self._folder / _VERSION} cannot be written: {error}") from error
        for other in self._folder.iterdir():
            if other.name.lstrip(".").startswith("version-") and other != self.path(version):
                shutil.rmtree(other, ignore_errors=True)
