"""A bucket in memory that other processes of the machine can open: shared memory on a CPU, an IPC handle on CUDA.

The payload is what SGLang's `update_weights_from_tensor` takes with `load_format="flattened_bucket"` (0.5.23,
srt/model_executor/model_runner_components/weight_updater.py:383): the handle of the flat bytes and where each tensor
lies in them, pickled. SGLang opens it with an unpickler that knows a list of globals (srt/utils/common.py:3144), and so
does `open_shared_bucket`: nothing else in a payload is ever called.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from megappo.errors import WorkerError
from megappo.weights.buckets import BucketMeta, places, torch_dtype

T = TypeVar("T")

_TRIES = 5
"""How often torch's manager of shared memory is asked, which torch itself waits for one second each time."""
_NO_ANSWER = "Shared memory manager connection has timed out"
_DEVICE = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the device."""
_ALLOWED = {
    ("builtins", "bool"),
    ("builtins", "dict"),
    ("builtins", "int"),
    ("builtins", "list"),
    ("builtins", "str"),
    ("builtins", "tuple"),
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
}


def share_bucket(bucket: BucketMeta, flat: torch.Tensor) -> bytes:
    """Return the payload for one process, which must open it once; `flat` [num_bytes] uint8 must live until then."""
    with shared_by_name():
        return ask_manager(lambda: _pickled({"flattened_tensor": flat, "metadata": _places(bucket)}))


def _pickled(content: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(content)
    return stream.getvalue()


def _places(bucket: BucketMeta) -> list[SimpleNamespace]:
    """Return where each tensor lies, under the field names of SGLang's FlattenedTensorMetadata."""
    dtype = torch_dtype(bucket.dtype)
    return [
        SimpleNamespace(
            name=name,
            shape=torch.Size(shape),
            dtype=dtype,
            start_idx=place.start * dtype.itemsize,
            end_idx=place.stop * dtype.itemsize,
            numel=len(place) * dtype.itemsize,
        )
        for name, shape, place in places(bucket)
    ]


def open_shared_bucket(payload: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a payload as views of the shared bytes.

    Raises:
        ValueError: the payload names anything that is not part of a shared bucket.
        WorkerError: as `ask_manager`.
    """
    content = ask_manager(lambda: _Unpickler(io.BytesIO(payload)).load())
    flat = content["flattened_tensor"]
    return {
        place.name: flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
        for place in content["metadata"]
    }


def ask_manager(ask: Callable[[], T]) -> T:
    """Return what `ask` gives, which makes or opens shared memory: torch keeps a process that removes the memory of
    processes that died, and on a loaded machine it may be late.

    Raises:
        WorkerError: it does not answer, however often it is asked.
    """
    for _ in range(_TRIES):
        try:
            return ask()
        except RuntimeError as error:
            if _NO_ANSWER not in str(error):
                raise
    raise WorkerError(
        f"shared memory: torch_shm_manager did not answer {_TRIES} times in a row, within a second each "
        "(the machine is overloaded, or the process was stopped)"
    )


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Share CPU tensors by the name of their memory: a descriptor can be passed on only to a process that has the key
    of this one."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class _Pickler(ForkingPickler):
    """Names the device of a CUDA tensor by its identity: processes that see other devices number them differently."""

    def reducer_override(self, obj: object) -> Any:  # Any: what pickle takes
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            rebuild, reduced = reductions.reduce_tensor(obj)
            arguments: tuple[Any, ...] = reduced
            identity = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
            return rebuild, (*arguments[:_DEVICE], identity, *arguments[_DEVICE + 1 :])
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:  # Any: whatever the list allows
        if (module, name) not in _ALLOWED:
            raise ValueError(f"a bucket of weights must not name {module}.{name}")
        return _rebuild_cuda_tensor if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:  # Any: torch's own arguments
    identities = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if arguments[_DEVICE] not in identities:
        raise ValueError(f"the bucket is on GPU {arguments[_DEVICE]}, which this process does not see")
    rebuild: Callable[..., torch.Tensor] = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:_DEVICE], identities.index(arguments[_DEVICE]), *arguments[_DEVICE + 1 :])
