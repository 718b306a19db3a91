"""How the ranks of one machine put a bucket together: each writes its pieces where the sender's buffer is.

Nothing is sent but where the buffer is and, for each bucket, that it may be written and has been. On CUDA the ranks
write into the sender's device, so they must see it.
"""

from collections.abc import Callable

import torch

from megappo.weights.buckets import BucketMeta
from megappo.weights.shared_bucket import open_shared_bucket, share_bucket, shared_by_name

MESSAGE_BYTES = 4096
_LENGTH_BYTES = 4
_NAME = "buffer"

Exchange = Callable[[dict[int, torch.Tensor]], None]
"""Sends bytes to, or receives them from, each of some ranks."""


class BufferOwner:
    """The sender's end."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            with shared_by_name():
                self.buffer.share_memory_()
        self._told: set[int] = set()

    def invite(self, ranks: list[int], send: Exchange) -> None:
        """Say that the buffer may be written and, the first time, where it is."""
        messages: dict[int, torch.Tensor] = {}
        for rank in ranks:
            payload = b"" if rank in self._told else share_bucket(_meta(len(self.buffer)), self.buffer)
            assert len(payload) <= MESSAGE_BYTES - _LENGTH_BYTES, f"a handle of {len(payload)} bytes"
            content = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload
            message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
            message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            messages[rank] = message.to(self.buffer.device)
        self._told.update(ranks)
        send(messages)

    def wait(self, ranks: list[int], receive: Exchange) -> None:
        """Wait until the ranks have written."""
        receive({rank: torch.empty(1, dtype=torch.uint8, device=self.buffer.device) for rank in ranks})


class BufferGuest:
    """The end of a rank that feeds."""

    def __init__(self, sender: int, device: torch.device) -> None:
        self._sender = sender
        self._device = device
        self._buffer: torch.Tensor | None = None

    def wait(self, receive: Exchange) -> torch.Tensor:
        """Wait until the buffer may be written, and return it."""
        message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=self._device)
        receive({self._sender: message})
        content = bytes(message.tolist())
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        if length:
            self._buffer = open_shared_bucket(content[_LENGTH_BYTES : _LENGTH_BYTES + length])[_NAME]
        assert self._buffer is not None
        return self._buffer

    def done(self, send: Exchange) -> None:
        """Say that this rank has written."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        send({self._sender: torch.zeros(1, dtype=torch.uint8, device=self._device)})


def _meta(num_bytes: int) -> BucketMeta:
    return BucketMeta(names=[_NAME], shapes=[[num_bytes]], dtype="uint8", num_bytes=num_bytes)
