"""Reading and writing the weights of a Hugging Face folder: one safetensors file, or shards with an index."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megappo.errors import CheckpointError, StorageError
from megappo.weights.buckets import BucketMeta
from megappo.weights.name_map import Partition
from megappo.weights.safetensors_file import SafetensorsFile
from megappo.weights.transforms import shard_range

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf"),
    *(".h5", ".msgpack", ".onnx"),
    ".distcp",
)
_CHECKPOINT_FILES = (".metadata", "metadata.json", "model.json", "conversion.json")
"""Files of a checkpoint's folder, and of a converted one, which belong to its weights."""


class HuggingFaceWeights:
    """The tensors of a folder, read lazily: only the files, tensors and slices asked for. Use as a context manager.

    Raises:
        CheckpointError: no safetensors in the folder, or the index names files or tensors that are not there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of = self._read_index()
        self._names = frozenset(self._file_of)

    def _read_index(self) -> dict[str, str]:
        index = self.path / _INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        if not (self.path / _SINGLE).is_file():
            raise CheckpointError(
                f"{self.path} holds neither {_SINGLE} nor {_INDEX} (save the model with safe_serialization=True)"
            )
        return dict.fromkeys(self._open(_SINGLE).names(), _SINGLE)

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._files:
            self._files[file] = SafetensorsFile(self.path / file)
        return self._files[file]

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return self._names

    def stray_names(self) -> list[str]:
        """Return the tensors that lie in a file without being named in the index, sorted. Opens all files."""
        files = set(self._file_of.values())
        return sorted(name for file in files for name in self._open(file).names() if self._file_of.get(name) != file)

    def ghost_names(self) -> list[str]:
        """Return the tensors that the index names in a file that lacks them, sorted. Opens all files."""
        return sorted(name for name, file in self._file_of.items() if name not in self._open(file).names())

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape without reading it."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type without reading it."""
        return self._file(name).dtype(name)

    def read(self, name: str, partition: Partition, *, rank: int, size: int) -> torch.Tensor:
        """Return rank's part of a tensor under tensor parallelism; nothing else is read from disk. It lies in the file:
        copy it to keep it."""
        tensor = self._file(name).tensor(name)
        if partition is Partition.replicated:
            return tensor
        held = shard_range(tensor.shape[partition.value], rank=rank, size=size)
        return tensor.narrow(partition.value, held.start, len(held))

    def _file(self, name: str) -> SafetensorsFile:
        file = self._open(self._file_of[name])
        if name not in file.names():
            raise CheckpointError(f"{self.path / _INDEX} names {name}, which is not in its file {file.path.name}")
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()


def shard_files(num_shards: int) -> list[str]:
    """Return the file names of a model in `num_shards` files, as transformers names them."""
    if num_shards == 1:
        return [_SINGLE]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def write_shard(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one weight file. Raises StorageError."""
    try:
        # transformers refuses files without this metadata.
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file} cannot be written: {error}") from error


def start_folder(output: Path) -> None:
    """Make the empty `partial_folder`. Raises StorageError."""
    partial = partial_folder(output)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"{partial} cannot be made: {error}") from error


def finish_folder(
    output: Path, *, source: Path, buckets: Sequence[BucketMeta], config_changes: Mapping[str, object]
) -> None:
    """Complete the folder of `start_folder` and give it its name, in place of one that had it.

    Adds the index of the shards (file i holds bucket i), and all files of `source` that are no weights: config.json
    with `config_changes`, the others (tokenizer, chat template, generation config) as they are.

    Raises:
        StorageError: a file cannot be written. Whatever had the name before is still there.
    """
    partial = partial_folder(output)
    try:
        if len(buckets) > 1:
            _write_index(partial, buckets)
        for file in side_files(source):
            shutil.copy(file, partial / file.name)
        config = json.loads((partial / "config.json").read_text(encoding="utf-8")) | dict(config_changes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StorageError(f"{output} cannot be written: {error}") from error
    name_folder(output)


def name_folder(output: Path) -> None:
    """Give the `partial_folder` its name, in place of one that had it.

    Raises:
        StorageError: the folder cannot be renamed. Whatever had the name before is still there.
    """
    old = _former_folder(output)
    try:
        _settle_former(output)
        if output.exists():
            os.rename(output, old)
        try:
            os.rename(partial_folder(output), output)
        finally:
            _settle_former(output)
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error}") from error


def _settle_former(output: Path) -> None:
    """Give a folder that made room its name back where no other has it (a kill came between two renames), else remove
    it. Raises OSError."""
    old = _former_folder(output)
    if old.exists() and not output.exists():
        os.rename(old, output)
    shutil.rmtree(old, ignore_errors=True)


def side_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that are not its weights: config, tokenizer, chat template and the like."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name not in _CHECKPOINT_FILES
    )


def partial_folder(output: Path) -> Path:
    """Return the folder in which the model `output` is put together."""
    return output.with_name(f".{output.name}.partial")


def _former_folder(output: Path) -> Path:
    """Return where the folder of that name is while it makes room for another."""
    return output.with_name(f".{output.name}.old")


def _write_index(folder: Path, buckets: Sequence[BucketMeta]) -> None:
    files = shard_files(len(buckets))
    index = {
        "metadata": {"total_size": sum(bucket.num_bytes for bucket in buckets)},
        "weight_map": {name: file for file, bucket in zip(files, buckets) for name in bucket.names},
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
