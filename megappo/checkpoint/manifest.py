"""What a checkpoint consists of: the size and checksum of each of its files, and what the run wants to know again.

`manifest.json` is the last file written into the folder. Other programs may read it:

    {"format": 2, "step": 50, "created": "2026-01-31T12:00:00+00:00", "roles": ["actor", "critic"],
     "files": [{"path": "loop.json", "num_bytes": 812, "xxh3_128": "..."}, ...], "extra": {...}, "digest": "..."}

`digest` is the sha256 of the other entries, written by `json.dumps` without whitespace and with sorted keys. XXH3, of
the files, finds damage at the speed of memory (SHA-256 costs more CPU time than all else of a load); neither proves who
wrote them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megappo.checkpoint.reading import read_object, readable
from megappo.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
_READ_BYTES = 2**20


@dataclass(kw_only=True, slots=True, frozen=True)
class FileRecord:
    """One file of a checkpoint as it was written."""

    path: str
    """Relative to the folder that the record belongs to, with forward slashes."""
    num_bytes: int
    xxh3_128: str
    """Hex digest of its bytes (XXH3, 128 bits, seed 0)."""


def record_files(folder: Path, paths: Iterable[Path]) -> list[FileRecord]:
    """Read files below `folder` and return their records, sorted by path.

    Raises:
        OSError: one cannot be read.
    """
    records: list[FileRecord] = []
    for path in paths:
        digest = file_digest(path)
        relative = path.relative_to(folder).as_posix()
        records.append(FileRecord(path=relative, num_bytes=path.stat().st_size, xxh3_128=digest))
    return sorted(records, key=lambda record: record.path)


def file_digest(path: Path) -> str:
    """Return the hex digest of a file's bytes. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


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
            FileRecord(path=record.path.removeprefix(prefix), num_bytes=record.num_bytes, xxh3_128=record.xxh3_128)
            for record in self.files
            if record.path.startswith(prefix)
        ]

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        # As it will be read: other keys than text become text, in another order.
        content = json.loads(json.dumps({"format": FORMAT} | asdict(self)))
        return json.dumps(content | {"digest": digest_of(content)}, indent=1) + "\n"


def digest_of(content: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the checksum of a JSON object, whose keys may come in any order."""
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: it is not there, is damaged, or is of a format that this version does not know.
    """
    path = folder / MANIFEST
    if folder.is_dir() and not path.exists():
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it is no checkpoint, or was not finished")
    with readable(path):
        content = read_object(path)
        if (found := content["format"]) != FORMAT:
            raise CheckpointError(f"{path} has format {found}, this version of megappo reads format {FORMAT}")
        if content.pop("digest") != digest_of(content):
            raise CheckpointError(f"{path} is damaged: its digest is that of another content")
        del content["format"]
        files = [FileRecord(**record) for record in content.pop("files")]
        return Manifest(files=files, **content)
