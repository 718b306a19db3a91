"""The files of a checkpoint as Megatron's dist_checkpointing has them (`torch_dist`), read and written part by part.

They are those of torch.distributed.checkpoint (`.metadata`, `*.distcp`) and two more: `metadata.json`, which names the
format, and `common.pt`, which holds what is the same on all ranks. Megatron's own functions want a model in memory, and
torch's writer keeps all tensors of a file until it is closed (distributed/checkpoint/filesystem.py, `tensor_dict`).
"""

import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megappo.checkpoint.reading import read_object, readable
from megappo.errors import CheckpointError, StorageError, listed

_FORMAT_FILE = "metadata.json"
_COMMON_FILE = "common.pt"
_METADATA_FILE = ".metadata"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredItem:
    """One piece that is written: a part of a tensor, or, without `shape`, an object that was pickled."""

    key: str
    file: str
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        """Of a tensor's part; 0 for an object."""
        return 0 if self.shape is None or self.dtype is None else math.prod(self.shape) * self.dtype.itemsize


class StoredFolder:
    """A checkpoint's tensors and objects, read piece by piece.

    `.metadata` is a pickle: read only what you trust, as with everything that torch saves.

    Raises:
        CheckpointError: the folder is no checkpoint of this format, or files are missing or cut off; all are named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        _check_format(path)
        with readable(path / _METADATA_FILE):
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            self.entries: dict[str, Any] = dict(metadata.state_dict_metadata)
            """What torch says of each key: `TensorStorageMetadata` or `BytesStorageMetadata`."""
            self._check_files(metadata)

    def _check_files(self, metadata: Metadata) -> None:
        """Refuse a folder whose files are not as long as `.metadata` says."""
        ends: dict[str, int] = {}
        for place in metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        problems: list[str] = []
        for name, end in sorted(ends.items()):
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                problems.append(f"{name} is missing")
            elif size < end:
                problems.append(f"{name} is cut off: {size:,} of {end:,} bytes")
        if problems:
            raise CheckpointError(f"{self.path} is damaged: {listed(problems)} (copy it again, or use another one)")

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Return what is known of each tensor: `size`, `chunks` and `properties.dtype`."""
        return {key: entry for key, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)}

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a part of a tensor.

        Raises:
            CheckpointError: the file is damaged or gone, or no part of the checkpoint covers it.
        """
        entry: TensorStorageMetadata = self.entries[key]
        chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))
        items = create_read_items_for_chunk_list(key, entry, [chunk])
        target = torch.empty(tuple(shape), dtype=entry.properties.dtype)
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise CheckpointError(f"{self.path} holds only a part of {key} {list(shape)} at {list(offset)}")
        self._read(key, items, _OneTensor(target))
        return target

    def read_object(self, key: str) -> io.BytesIO:
        """Read an object as it was pickled. Raises CheckpointError as `read`."""
        index = MetadataIndex(key)
        nothing = torch.Size((0,))
        item = ReadItem(
            type=LoadItemType.BYTE_IO,
            dest_index=index,
            dest_offsets=nothing,
            storage_index=index,
            storage_offsets=nothing,
            lengths=nothing,
        )
        planner = _OneTensor(torch.empty(0))
        self._read(key, [item], planner)
        return planner.content

    def _read(self, key: str, items: list[ReadItem], planner: "_OneTensor") -> None:
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except Exception as error:  # torch unpickles what lies there
            reason = f"{type(error).__name__}: {error}"
            if not self.path.is_dir():
                reason = "the folder was removed meanwhile, as a run does with older checkpoints (take a newer one)"
            raise CheckpointError(f"{key} cannot be read from {self.path}: {reason}") from error


def _check_format(path: Path) -> None:
    file = path / _FORMAT_FILE
    if not file.is_file() or not (path / _METADATA_FILE).is_file():
        raise CheckpointError(
            f"{path} is no Megatron checkpoint: it holds no {_FORMAT_FILE} or no {_METADATA_FILE} "
            "(give a folder such as <run>/checkpoints/step_000040/actor)"
        )
    with readable(file):
        backend = read_object(file)["sharded_backend"]
    if backend != _FORMAT["sharded_backend"]:
        raise CheckpointError(f"{path} is in the format {backend}, only torch_dist is read (save it as torch_dist)")


class _OneTensor(LoadPlanner):
    """Where one tensor, or one object, is read to."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self.content = io.BytesIO()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the place of a piece."""
        place = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            place = place.narrow(dim, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The piece lies where it belongs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object."""
        self.content = value

    # The plan is made by the caller.
    def set_up_planner(self, *arguments: Any, **options: Any) -> None: ...
    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError


def write_stored(
    folder: Path, items: Sequence[StoredItem], read: Callable[[StoredItem], torch.Tensor | io.BytesIO]
) -> None:
    """Write this process's share of a checkpoint into the existing `folder`; all processes must call it.

    Args:
        items: in the order of their files, each of which one process writes. One is taken at a time.
        read: gives the content of an item.

    Raises:
        StorageError: on every process, with what the first one met.
        CheckpointError: likewise, where that is what `read` raised.
    """
    planner = _StreamPlanner(items, read)
    try:
        save(
            {},
            storage_writer=_StreamWriter(folder, planner),
            planner=planner,
            no_dist=not torch.distributed.is_initialized(),
        )
    except CheckpointException as error:
        rank, failure = min(error.failures.items())
        cause = failure[0]
        if isinstance(cause, KeyboardInterrupt):
            raise cause from error
        if isinstance(cause, CheckpointError):
            raise cause from error  # of what is read
        reason = cause if isinstance(cause, OSError) else repr(cause)
        raise StorageError(f"{folder} cannot be written (process {rank}): {reason}") from error


def finish_stored(folder: Path, *, common: Mapping[str, Any]) -> None:  # Any: numbers
    """Add what makes the folder a checkpoint of Megatron's; one process calls it. Raises OSError.

    Args:
        common: what is the same on all ranks.
    """
    torch.save(dict(common), folder / _COMMON_FILE)
    (folder / _FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")


class _StreamPlanner(SavePlanner):
    """Says what is written, and gets it when its turn comes."""

    def __init__(self, items: Sequence[StoredItem], read: Callable[[StoredItem], torch.Tensor | io.BytesIO]) -> None:
        self._items = {MetadataIndex(item.key, item.offset or None): item for item in items}
        self._read = read

    def set_up_planner(
        self,
        state_dict: Any,  # Any: what torch hands on
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """All is known already."""

    def create_local_plan(self) -> SavePlan:
        """Return this process's share."""
        return SavePlan([_write_item(index, item) for index, item in self._items.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the shares of all, and the content of `.metadata`."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this process writes."""
        return new_plan

    def item(self, write_item: WriteItem) -> StoredItem:
        """Return what an item of torch's plan stands for."""
        return self._items[write_item.index]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the content of an item."""
        return self._read(self.item(write_item))


def _write_item(index: MetadataIndex, item: StoredItem) -> WriteItem:
    if item.shape is None or item.dtype is None:
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(offsets=torch.Size(item.offset), sizes=torch.Size(item.shape))
    data = TensorWriteData(
        chunk=chunk, properties=TensorProperties(dtype=item.dtype), size=torch.Size(item.global_shape)
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class _StreamWriter(FileSystemWriter):
    """Writes item after item and keeps none."""

    def __init__(self, folder: Path, planner: _StreamPlanner) -> None:
        super().__init__(folder)
        self._folder = folder
        self._planner = planner

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this process."""
        results: list[WriteResult] = []
        for name, items in groupby(plan.items, key=lambda item: self._planner.item(item).file):
            with (self._folder / name).open("wb") as file:
                for item in items:
                    start = file.tell()
                    content = planner.resolve_data(item)
                    if isinstance(content, io.BytesIO):
                        file.write(content.getbuffer())
                    else:
                        _save_tensor(_alone(content), file)
                    length = file.tell() - start
                    place = _StorageInfo(name, start, length)
                    results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _save_tensor(tensor: torch.Tensor, file: BinaryIO) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # torch's writer fails once more when it is closed, and that error would hide the first.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares its memory with none: torch saves the memory behind a view, too."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
