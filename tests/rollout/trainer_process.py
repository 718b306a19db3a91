"""A trainer in a process of its own: the sending end of real hand-overs, for the contract tests of engines."""

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megappo.weight_sync import TRANSPORTS
from megappo.weight_sync.source import WeightSource
from megappo.weight_sync.transport import Bucket, SenderSpec, WeightSender
from megappo.weights.buckets import BucketMeta, TensorMeta, plan_buckets, torch_dtype
from megappo.weights.checksums import HeldTensor

ANSWER_S = 60.0

Sources = dict[str, list[BucketMeta]]
"""What each sender sends, by its name."""


class Trainer:
    """The process, seen from the test. One call at a time; `start` calls are answered by `finish`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end,), daemon=True)
        self._process.start()

    def start(self, call: str, **arguments: Any) -> None:
        """Begin a call."""
        self._pipe.send((call, arguments))

    def finish(self) -> Any:
        """Return the answer of the call begun. Raises RuntimeError with the trainer's error."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("the trainer does not answer")
        error, answer = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return answer

    def ask(self, call: str, **arguments: Any) -> Any:
        """Make a call and return its answer."""
        self.start(call, **arguments)
        return self.finish()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


class _TrainerSide:
    """What the process does."""

    def __init__(self) -> None:
        self.senders: dict[str, WeightSender] = {}

    def open(self, transport: str, spec: SenderSpec) -> None:
        self.senders[spec.name] = TRANSPORTS.get(transport).sender(spec)
        self.senders[spec.name].open()

    def close(self, name: str) -> None:
        self.senders.pop(name).close()

    def send(self, folder: Path, sources: Sources, wanted: Sequence[HeldTensor]) -> dict[str, str]:
        """Send the tensors of a folder; returns the checksums of the wanted ones."""
        sent: dict[str, str] = {}
        for name, buckets in sources.items():
            sent |= WeightSource(_fill(buckets, folder), self.senders[name], wanted=wanted).send_rest()
        return sent

    def begin(self, folder: Path, name: str, buckets: list[BucketMeta], wanted: Sequence[HeldTensor]) -> None:
        self.source = WeightSource(_fill(buckets, folder), self.senders[name], wanted=wanted)

    def send_next(self) -> dict[int, bytes]:
        return self.source.send_next()

    def send_rest(self) -> dict[str, str]:
        return self.source.send_rest()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    side = _TrainerSide()
    while True:
        call, arguments = pipe.recv()
        try:
            pipe.send((None, getattr(side, call)(**arguments)))
        except Exception as error:  # the process boundary: the test shows it
            pipe.send((f"{type(error).__name__}: {error}", None))


def _fill(buckets: Sequence[BucketMeta], folder: Path) -> Iterator[Bucket]:
    """Yield buckets with the tensors of a folder (zeros where it has none of that name and shape)."""
    state = load_file(folder / "model.safetensors")
    for bucket in buckets:
        tensors: list[torch.Tensor] = []
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            tensor = state.get(name, torch.empty(0))
            tensor = tensor if list(tensor.shape) == shape else torch.zeros(shape)
            tensors.append(tensor.to(torch_dtype(bucket.dtype)))
        yield bucket, torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def plan_sources(folder: Path, names: Sequence[str], *, bucket_bytes: int = 40_000, dtype: str = "float32") -> Sources:
    """Deal the tensors of a folder to so many sources, in buckets of a few tensors each."""
    tensors = [
        TensorMeta(name=name, shape=list(tensor.shape), dtype=dtype)
        for name, tensor in sorted(load_file(folder / "model.safetensors").items())
    ]
    return {name: plan_buckets(tensors[start :: len(names)], bucket_bytes) for start, name in enumerate(names)}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
