"""Reading and writing the weights of a Hugging Face folder: one safetensors file, or shards with an index."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megappo.errors import CheckpointError
from megappo.weights.transforms import Partition

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HuggingFaceWeights:
    """The tensors of a folder, read lazily: only the files, tensors and slices asked for. Use as a context manager.

    Raises:
        CheckpointError: no safetensors in the folder, or the index names files or tensors that are not there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Any] = {}  # Any: safetensors' handles
        self._file_of = self._read_index()

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

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape without reading it."""
        return list(self._slice(name).get_shape())

    def read(self, name: str, partition: Partition, *, rank: int, size: int) -> torch.Tensor:
        """Read rank's part of a tensor under tensor parallelism; nothing else is read from disk."""
        view = self._slice(name)
        if partition is Partition.replicated:
            return view[:]
        part = view.get_shape()[partition.value] // size
        own = slice(rank * part, (rank + 1) * part)
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
