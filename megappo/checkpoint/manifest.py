"""What a checkpoint consists of: the size and checksum of each of its files, and what the run wants to know again.

`manifest.json` is the last file written into the folder. Other programs may read it:

    {"format": 1, "step": 50, "created": "2026-01-31T12:00:00+00:00", "roles": ["actor", "critic"],
     "files": [{"path": "loop.json", "num_bytes": 812, "sha256": "..."}, ...], "extra": {...}, "digest": "..."}

`digest` is the sha256 of the other entries, written by `json.dumps` without whitespace and with sorted keys.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megappo.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class FileRecord:
    """One file of a checkpoint as it was written."""

    path: str
    """Relative to the folder that the record belongs to, with forward slashes."""
    num_bytes: int
    sha256: str
    """Hex digest of its bytes."""


def record_files(folder: Path, paths: Iterable[Path]) -> list[FileRecord]:
    """Read files below `folder` and return their records, sorted by path.

    Raises:
        OSError: one cannot be read.
    """
    records: list[FileRecord] = []
    for path in paths:
        digest = file_digest(path)
        relative = path.relative_to(folder).as_posix()
        records.append(FileRecord(path=relative, num_bytes=path.stat().st_size, sha256=digest))
    return sorted(records, key=lambda record: record.path)


def file_digest(path: Path) -> str:
    """Return the hex digest of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    created: str
    """ISO 8601 with its time zone."""
    roles: list[str]
    """Folders whose files the ranks of a model recorded: actor, critic."""
    files: list[FileRecord]
    """Every file of the folder but the manifest itself, by path."""
    # Any: JSON, known to the one who saves.
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(record.num_bytes for record in self.files)

    def files_of(self, role: str) -> list[FileRecord]:
        """Return the records of one role, relative to its folder."""
        prefix = f"{role}/"
        return [
            FileRecord(path=record.path.removeprefix(prefix), num_bytes=record.num_bytes, sha256=record.sha256)
            for record in self.files
            if record.path.startswith(prefix)
        ]

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        # As it will be read: other keys than text become text, in another order.
        content = json.loads(json.dumps({"format": FORMAT} | asdict(self)))
        return json.dumps(content | {"digest": _digest(content)}, indent=1) + "\n"


def _digest(content: Mapping[str, Any]) -> str:  # Any: JSON
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: it is not there, is damaged, or is of a format that this version does not know.
    """
    path = folder / MANIFEST
    try:
        # Any: JSON
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (found := content["format"]) != FORMAT:
            raise CheckpointError(f"{path} has format {found}, this version of megappo reads format {FORMAT}")
        if content.pop("digest") != _digest(content):
            raise CheckpointError(f"{path} is damaged: its digest is that of another content")
        del content["format"]
        files = [FileRecord(**record) for record in content.pop("files")]
        return Manifest(files=files, **content)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it is no checkpoint, or was not finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
