"""Where the files of a source are: on this machine, or anywhere that fsspec reaches.

A path without `://` is a file or glob of this machine; anything else is a URL for fsspec, which knows many protocols
and names the package to install for one that it cannot load (s3: `s3fs`, gs: `gcsfs`, hf: `huggingface_hub`).
"""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import aiohttp
import fsspec
from fsspec.utils import infer_compression

from megappo.config.data import SourceConfig
from megappo.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class DataFile:
    """One file of a source."""

    name: str
    """As messages show it."""
    # Any: fsspec has no types.
    system: Any
    path: str
    """Inside of the file system."""

    @contextmanager
    def open(self, *, decompress: bool = False) -> Iterator[BinaryIO]:
        """Open the file for reading.

        Raises:
            DataError: it cannot be read, or what reads it inside the block fails with an OSError.
        """
        compression = infer_compression(self.path) if decompress else None
        try:
            with self.system.open(self.path, "rb", compression=compression) as file:
                yield cast(BinaryIO, file)
        except IsADirectoryError as error:
            raise DataError(f"{self.name}: is a folder (give its files: {self.name}/*)") from error
        except (OSError, EOFError, ImportError, aiohttp.ClientError) as error:
            raise DataError(f"{self.name}: cannot be read: {_why(error)}") from error
        except ValueError as error:
            if compression is None or isinstance(error, UnicodeError):
                raise
            raise DataError(f"{self.name}: cannot be read as {compression}: {error}") from error


def find_files(config: SourceConfig) -> list[DataFile]:
    """Return the files of `path`, sorted by name.

    Raises:
        DataError: no path, no such file system, it does not answer, or no file matches.
    """
    where = f"data source {config.kind}"
    if config.path is None:
        raise DataError(f"{where}: path is missing (give a file or a glob)")
    system, path = _system(config, config.path, where)
    try:
        found = sorted(glob.glob(path, recursive=True)) if _is_local(config.path) else sorted(system.glob(path))
        if not found and not _is_local(config.path):
            _ask_for(system, path)
    except Exception as error:  # the boundary to a file system, whose package has errors of its own
        raise DataError(f"{where}: path={config.path} cannot be read: {_why(error)}") from error
    if not found:
        raise DataError(f"{where}: no file matches path={config.path}")
    return [DataFile(name=_name(system, name, config.path), system=system, path=name) for name in found]


def find_folder(config: SourceConfig) -> DataFile:
    """Return the folder of `path`. Raises DataError where there is no such folder."""
    where = f"data source {config.kind}"
    if config.path is None:
        raise DataError(f"{where}: path is missing (give a folder)")
    system, path = _system(config, config.path, where)
    if not system.isdir(path):
        raise DataError(f"{where}: path={config.path} is not a folder")
    return DataFile(name=config.path.rstrip("/"), system=system, path=path.rstrip("/"))


def within(folder: DataFile, name: str) -> DataFile:
    """Return a file or folder inside a folder; it need not exist."""
    return DataFile(name=f"{folder.name}/{name}", system=folder.system, path=f"{folder.path}/{name}")


def _ask_for(system: Any, path: str) -> None:  # Any: fsspec has no types
    """Raise what keeps a path from being there. Some systems take a host that is down for one without files."""
    try:
        system.info(path)
    except FileNotFoundError as error:
        if error.__cause__ is not None:
            raise


def _why(error: BaseException) -> str:
    """Return what went wrong, in words. A file that is not found may be a host that is not: that is its cause."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def _is_local(path: str) -> bool:
    return "://" not in path


def _name(system: Any, path: str, given: str) -> str:
    return path if _is_local(given) else str(system.unstrip_protocol(path))


def _system(config: SourceConfig, path: str, where: str) -> tuple[Any, str]:  # Any: fsspec has no types
    """Return the file system and the path inside it."""
    if _is_local(path):
        return fsspec.filesystem("file"), path
    try:
        system, inside = fsspec.core.url_to_fs(path, **config.storage_options)
    except ImportError as error:
        raise DataError(f"{where}: path={path}: {error}") from error
    except (ValueError, TypeError, OSError) as error:
        options = f" with storage_options={config.storage_options}" if config.storage_options else ""
        raise DataError(f"{where}: path={path} cannot be reached{options}: {error}") from error
    return system, inside
