"""Hand-over by broadcast over a process group of the source and all engines: NCCL on CUDA, gloo on a CPU."""

from collections.abc import Iterable

import torch.distributed as dist

from megappo.device.process_group import destroy_named_group, init_named_group, named_group
from megappo.weight_sync.transport import Bucket, SenderSpec


class BroadcastSender:
    """Rank 0 of a group. One flat run of bytes per bucket is what SGLang's `flattened_bucket` expects
    (sglang 0.5.23, srt/weight_sync/tensor_bucket.py), so the trainer needs no sglang."""

    def __init__(self, spec: SenderSpec) -> None:
        self._spec = spec

    def join(self) -> None:
        """Meet the engines."""
        init_named_group(
            name=self._spec.group,
            address=self._spec.address,
            port=self._spec.port,
            world_size=self._spec.world_size,
            rank=0,
            backend=self._spec.backend,
            timeout_s=self._spec.timeout_s,
        )

    def send(self, buckets: Iterable[Bucket]) -> int:
        """Broadcast each bucket."""
        group = named_group(self._spec.group)
        sent = 0
        for meta, flat in buckets:
            assert flat.numel() == meta.num_bytes, f"a bucket of {meta.num_bytes} bytes has {flat.numel()}"
            dist.broadcast(flat, src=0, group=group)
            sent += meta.num_bytes
        return sent

    def close(self) -> None:
        """Leave the group."""
        destroy_named_group(self._spec.group)
