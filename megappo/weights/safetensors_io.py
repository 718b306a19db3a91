"""Reading and writing the weights of a Hugging Face folder: one safetensors file, or shards with an index."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megappo.errors import CheckpointError
from megappo.weights.buckets import BucketMeta
from megappo.weights.name_map import Partition
from megappo.weights.transforms import shard_range

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


class HuggingFaceWeights:
    """The tensors of a folder, read lazily: only the files, tensors and slices asked for. Use as a context manager.

    Raises:
        CheckpointError: no safetensors in the folder, or the index names files or tensors that are not there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Any] = {}  # Any: safetensors' handles
        self._file_of = self._read_index()
        self._names = frozenset(self._file_of)

    def _read_index(self) -> dict[str, str]:
        if (self.path / _INDEX).is_file():
            return dict(json.loads((self.path / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        if not (self.path / _SINGLE).is_file():
            raise CheckpointError(
                f"{self.path} holds neither {_SINGLE} nor {_INDEX} (save the model with safe_serialization=True)"
            )
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:  # Any: safetensors' handle
        if file not in self._files:
            try:
                handle = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / file} cannot be read: {error}") from error
            self._files[file] = handle
        return self._files[file]

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return self._names

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape without reading it."""
        return list(self._slice(name).get_shape())

    def read(self, name: str, partition: Partition, *, rank: int, size: int) -> torch.Tensor:
        """Read rank's part of a tensor under tensor parallelism; nothing else is read from disk."""
        view = self._slice(name)
        if partition is Partition.replicated:
            return view[:]
        held = shard_range(view.get_shape()[partition.value], rank=rank, size=size)
        own = slice(held.start, held.stop)
        return view[own] if partition is Partition.column else view[:, own]

    def _slice(self, name: str) -> Any:  # Any: safetensors' slice object
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / _INDEX} names {name}, which is not in its file: {error}") from error

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
    """Write one weight file. Raises CheckpointError."""
    try:
        # transformers refuses files without this metadata.
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from error


def start_folder(output: Path) -> None:
    """Make the empty `partial_folder`. Raises CheckpointError."""
    partial = partial_folder(output)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be made: {error}") from error


def finish_folder(
    output: Path, *, source: Path, buckets: Sequence[BucketMeta], config_changes: Mapping[str, object]
) -> None:
    """Complete the folder of `start_folder` and give it its name, in place of one that had it.

    Adds the index of the shards (file i holds bucket i), and all files of `source` that are no weights: config.json
    with `config_changes`, the others (tokenizer, chat template, generation config) as they are.

    Raises:
        CheckpointError: a file cannot be written. Whatever had the name before is still there.
    """
    partial, old = partial_folder(output), output.with_name(f".{output.name}.old")
    try:
        if len(buckets) > 1:
            _write_index(partial, buckets)
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copy(file, partial / file.name)
        config = json.loads((partial / "config.json").read_text(encoding="utf-8")) | dict(config_changes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if output.exists():
            os.rename(output, old)
        os.rename(partial, output)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{output} cannot be written: {error}") from error


def partial_folder(output: Path) -> Path:
    """Return the folder in which the model `output` is put together."""
    return output.with_name(f".{output.name}.partial")


def _write_index(folder: Path, buckets: Sequence[BucketMeta]) -> None:
    files = shard_files(len(buckets))
    index = {
        "metadata": {"total_size": sum(bucket.num_bytes for bucket in buckets)},
        "weight_map": {name: file for file, bucket in zip(files, buckets) for name in bucket.names},
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
