"""Senders that fail in a chosen way, behind the same port as the real ones."""

import torch

from megappo.weight_sync.broadcast import BroadcastSender
from megappo.weight_sync.transport import Flow, SenderSpec, Transport
from megappo.weights.buckets import BucketMeta, open_bucket

CORRUPTED = "model.layers.1.mlp.down_proj.weight"


class CorruptingSender(BroadcastSender):
    """Changes one number of one tensor on the wire, after its checksum was taken."""

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        if CORRUPTED in bucket.names:
            flat = flat.clone()
            open_bucket(bucket, flat)[CORRUPTED][0, 0] += 1.0
        return super().send(bucket, flat)


class BreakingSender(BroadcastSender):
    """Leaves its group instead of sending a second bucket."""

    def __init__(self, spec: SenderSpec) -> None:
        super().__init__(spec)
        self._sent = 0

    def send(self, bucket: BucketMeta, flat: torch.Tensor) -> dict[int, bytes]:
        self._sent += 1
        if self._sent == 2:
            self.close()
            raise RuntimeError("the sender broke")
        return super().send(bucket, flat)


CORRUPTING = Transport(flow=Flow.streamed, sender=CorruptingSender)
BREAKING = Transport(flow=Flow.streamed, sender=BreakingSender)
