"""Hand-over by broadcast over a process group of the source and all engines: NCCL on CUDA, gloo on a CPU."""

import time

import torch
import torch.distributed as dist

from megappo.device.process_group import destroy_named_group, init_named_group, named_group
from megappo.errors import WorkerError
from megappo.weight_sync.transport import SenderSpec
from megappo.weights.buckets import BucketMeta


class BroadcastSender:
    """Rank 0 of a group. One flat run of bytes per bucket is what SGLang's `flattened_bucket` expects
    (sglang 0.5.23, srt/weight_sync/tensor_bucket.py), so the trainer needs no sglang.

    A group whose broadcast failed is dead: the next hand-over needs one of another name.
    """

    def __init__(self, spec: SenderSpec) -> None:
        self._spec = spec

    def open(self) -> None:
        """Meet the engines."""
        init_named_group(
            name=self._spec.name,
            address=self._spec.address,
            port=self._spec.port,
            world_size=1 + self._spec.engine_ranks,
            rank=0,
            backend=self._spec.backend,
            timeout_s=self._spec.timeout_s,
        )

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        """Broadcast one bucket."""
        assert flat.numel() == bucket.num_bytes, f"a bucket of {bucket.num_bytes} bytes has {flat.numel()}"
        group = named_group(self._spec.name)
        work = dist.broadcast(flat, src=0, group=group, async_op=self._spec.backend.kind == "cuda")
        if work is not None:
            _wait(work, group, timeout_s=self._spec.timeout_s)
        return {}

    def close(self) -> None:
        """Leave the group; engines that wait in it fail."""
        destroy_named_group(self._spec.name)


def _wait(work: dist.Work, group: dist.ProcessGroup, *, timeout_s: float) -> None:
    """Wait for a broadcast over NCCL, which by itself returns at once and, late, ends the whole process.

    Raises:
        WorkerError: it is not done in time; the group has been aborted.
    """
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            group.abort()
            raise WorkerError(f"broadcast of a bucket: not done within {timeout_s:g} s")
        time.sleep(0.0005)
