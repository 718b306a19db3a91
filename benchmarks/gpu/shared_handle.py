"""A bucket of weights handed to another process by a handle (CUDA IPC, shared memory on a CPU), without a copy."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.check import Check
from megappo.weights.buckets import BucketMeta
from megappo.weights.shared_bucket import open_shared_bucket, share_bucket

_WAIT_S = 120.0
_SHAPE = (1024, 1024)
_NAMES = ["first", "second"]
_MARK = 7.0


def check_shared_handle(device: torch.device) -> Iterator[Check]:
    """Share two tensors, have another process compare and overwrite them, and look at what is here then."""
    numel = _SHAPE[0] * _SHAPE[1]
    num_bytes = len(_NAMES) * numel * 4
    bucket = BucketMeta(names=_NAMES, shapes=[list(_SHAPE)] * len(_NAMES), dtype="float32", num_bytes=num_bytes)
    values = _values(device)
    flat = values.view(torch.uint8)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, device.type))
    process.start()
    there.close()
    try:
        here.send_bytes(share_bucket(bucket, flat))
        if not here.poll(_WAIT_S):
            raise TimeoutError(f"the other process did not answer within {_WAIT_S:g} s")
        wrong = float(here.recv())
    except EOFError:
        process.join()
        raise RuntimeError(f"the other process ended with exit code {process.exitcode}, see above") from None
    finally:
        process.kill()
        process.join()
    name = f"shared handle, {device.type}"
    yield Check(name=f"{name}: numbers that arrived wrong", difference=wrong, tolerance=0)
    left = float((values != _MARK).sum())
    yield Check(name=f"{name}: numbers that the other process did not write here", difference=left, tolerance=0)


def _values(device: torch.device) -> torch.Tensor:
    """Return the numbers of the bucket, flat; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(_NAMES) * _SHAPE[0] * _SHAPE[1], generator=generator).to(device)


def _receive(pipe: Connection, kind: str) -> None:
    """The other process."""
    tensors = open_shared_bucket(pipe.recv_bytes())
    received = torch.cat([tensors[name].reshape(-1) for name in _NAMES])
    wrong = int((received != _values(torch.device(kind))).sum())
    for tensor in tensors.values():
        tensor.fill_(_MARK)
    if kind == "cuda":
        torch.cuda.synchronize()
    pipe.send(wrong)
