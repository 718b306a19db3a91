"""One safetensors file: its header checked before anything is read, its tensors mapped and written one by one.

A file is 8 bytes with the length of the header (little-endian), the header (JSON: name -> dtype, shape, and where its
bytes begin and end behind the header) and the bytes of the tensors.

The library's own functions are for whole models: its reader keeps every page that was touched in memory as long as the
file is open, and its writer wants all tensors of a file at once.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megappo.errors import CheckpointError, StorageError
from megappo.weights.buckets import TensorMeta, torch_dtype

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = {"format": "pt"}
"""transformers refuses files without it."""


class SafetensorsFile:
    """The tensors of a file.

    Raises:
        CheckpointError: the file cannot be read, is cut off, or its header is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header, self._start = _read_header(file.read(_LENGTH_BYTES), file.read, path.stat().st_size)
            self._check(header, path.stat().st_size)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._entries = header
        self._names = frozenset(header)

    def _check(self, header: dict[str, Any], num_bytes: int) -> None:  # Any: values of a JSON object
        """Raise ValueError where the header does not fit the file."""
        end = 0
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"tensor {name} has the unknown dtype {entry['dtype']}")
            if stop - begin != math.prod(entry["shape"]) * dtype.itemsize:
                raise ValueError(f"tensor {name} of shape {entry['shape']} does not fill bytes {begin} to {stop}")
            end = max(end, stop)
        if self._start + end > num_bytes:
            raise ValueError(
                f"it is cut off: its header names {self._start + end:,} bytes, it has {num_bytes:,} (copy it again)"
            )

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return self._names

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor."""
        return list(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        return _DTYPES[self._entries[name]["dtype"]]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that lies in the file: only what is touched of it is read, and it leaves memory with the last
        view of it. Writing into it changes no file."""
        begin, stop = self._entries[name]["data_offsets"]
        shape, dtype = self.shape(name), self.dtype(name)
        if begin == stop:
            return torch.empty(shape, dtype=dtype)
        place = self._start + begin
        first = place - place % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), self._start + stop - first, access=mmap.ACCESS_COPY, offset=first)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        data = torch.frombuffer(pages, dtype=torch.uint8, count=stop - begin, offset=place - first)
        if place % dtype.itemsize:  # a header of odd length: torch reads aligned elements only
            data = data.clone()
        return data.view(dtype).view(shape)


def _read_header(length: bytes, read: Any, num_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the entries of a header and where the bytes of the tensors begin. `read` reads on behind `length`."""
    size = int.from_bytes(length, "little")
    if len(length) < _LENGTH_BYTES or _LENGTH_BYTES + size > num_bytes:
        raise ValueError(f"it is cut off within its header, or no safetensors file ({num_bytes:,} bytes)")
    header = json.loads(read(size))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, _LENGTH_BYTES + size


def write_safetensors(path: Path, metas: Sequence[TensorMeta], tensors: Iterable[torch.Tensor]) -> None:
    """Write a file of tensors that are taken one by one, in the order of `metas`, and wait until it is on disk.

    Raises:
        StorageError: the file cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": _METADATA}  # Any: values of a JSON object
    place = 0
    for meta in metas:
        dtype = _NAMES[torch_dtype(meta.dtype)]
        offsets = [place, place + meta.num_bytes]
        entries[meta.name] = {"dtype": dtype, "shape": meta.shape, "data_offsets": offsets}
        place += meta.num_bytes
    header = json.dumps(entries).encode("utf-8")
    header += b" " * (-len(header) % _ALIGNMENT)
    try:
        with path.open("wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for meta, tensor in zip(metas, tensors, strict=True):
                assert list(tensor.shape) == meta.shape and tensor.dtype is torch_dtype(meta.dtype), meta.name
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
