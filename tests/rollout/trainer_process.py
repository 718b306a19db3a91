"""A trainer in a process of its own: the sending end of real hand-overs, for the contract test of engines."""

import multiprocessing
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megappo.device.backend import CPU
from megappo.weight_sync import TRANSPORTS
from megappo.weight_sync.push import StageSource
from megappo.weight_sync.transport import Bucket, SenderSpec, WeightSender
from megappo.weights.buckets import BucketMeta, TensorMeta, plan_buckets, torch_dtype

ANSWER_S = 60.0


class Trainer:
    """The process, seen from the test. One call at a time; `start_` calls are answered by `finish`."""

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

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    senders: dict[str, WeightSender] = {}
    while True:
        call, arguments = pipe.recv()
        try:
            pipe.send((None, _CALLS[call](senders, **arguments)))
        except Exception as error:  # the process boundary: the test shows it
            pipe.send((f"{type(error).__name__}: {error}", None))


def _join(senders: dict[str, WeightSender], *, transport: str, group: str, port: int, world_size: int) -> None:
    spec = SenderSpec(
        group=group, address="127.0.0.1", port=port, world_size=world_size, backend=CPU, timeout_s=ANSWER_S
    )
    senders[group] = TRANSPORTS.get(transport)(spec)
    senders[group].join()


def _send(senders: dict[str, WeightSender], *, folder: Path, stages: list[StageSource]) -> int:
    """Send the tensors of a folder (zeros where it has none of that name and shape); returns the bytes sent."""
    state = load_file(folder / "model.safetensors")
    return sum(senders[stage.group].send(_fill(bucket, state) for bucket in stage.buckets) for stage in stages)


def _fill(bucket: BucketMeta, state: dict[str, torch.Tensor]) -> Bucket:
    tensors = []
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        tensor = state.get(name, torch.empty(0))
        tensor = tensor if list(tensor.shape) == shape else torch.zeros(shape)
        tensors.append(tensor.to(torch_dtype(bucket.dtype)))
    return bucket, torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


_CALLS = {"join": _join, "send": _send}


def plan_stages(folder: Path, groups: list[str], *, bucket_bytes: int = 40_000) -> list[StageSource]:
    """Deal the tensors of a folder to as many stages as there are groups, in buckets of a few tensors each."""
    tensors = [
        TensorMeta(name=name, shape=list(tensor.shape), dtype="float32")
        for name, tensor in sorted(load_file(folder / "model.safetensors").items())
    ]
    return [
        StageSource(group=group, buckets=plan_buckets(tensors[start :: len(groups)], bucket_bytes))
        for start, group in enumerate(groups)
    ]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
