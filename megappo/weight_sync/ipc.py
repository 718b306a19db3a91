"""Hand-over through memory that the engine's processes open: IPC handles on CUDA, shared memory on a CPU.

On CUDA a process opens only memory of a device that it sees, so engines are started with all devices of the pool in
sight.
"""

import torch

from megappo.weight_sync.transport import SenderSpec
from megappo.weights.buckets import BucketMeta
from megappo.weights.shared_bucket import share_bucket


class SharedMemorySender:
    """Shares one bucket at a time; the engines copy from it."""

    def __init__(self, spec: SenderSpec) -> None:
        self._spec = spec
        self._shared: torch.Tensor | None = None

    def open(self) -> None:
        """There is nobody to meet."""

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        """Share one bucket; the one before is given up."""
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()  # the engine's stream does not wait for this one
        self._shared = flat
        return {rank: share_bucket(bucket, flat) for rank in range(self._spec.engine_ranks)}

    def close(self) -> None:
        """Give up the last bucket."""
        self._shared = None
        if self._spec.backend.kind == "cuda":
            torch.cuda.ipc_collect()
