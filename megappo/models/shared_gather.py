"""How the ranks of one machine put a bucket together: each writes its pieces where the sender's buffer is.

Where the buffer is goes over the process group, once in a hand-over. That it may be written, and that it has been, goes
over sockets of the machine, bucket after bucket: a message of gloo takes fifty times the CPU time. On CUDA the ranks
write into the sender's device, so they must see it.
"""

import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megappo.errors import WorkerError
from megappo.weights.buckets import BucketMeta
from megappo.weights.shared_bucket import ask_manager, open_shared_bucket, share_bucket, shared_by_name

MESSAGE_BYTES = 4096
_NUMBER_BYTES = 4
_NAME = "buffer"
_SIGNAL = b"."

Exchange = Callable[[dict[int, torch.Tensor]], None]
"""Sends bytes to, or receives them from, each of some ranks."""


def new_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory that other processes can open, [num_bytes] uint8. Raises WorkerError."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        with shared_by_name():
            ask_manager(buffer.share_memory_)
    return buffer


class BufferOwner:
    """The sender's end in one hand-over. Raises WorkerError where another rank has left or is late."""

    def __init__(self, buffer: torch.Tensor, *, timeout_s: float) -> None:
        """`buffer` is of `new_buffer`; `timeout_s` is the longest wait for a rank."""
        self.buffer = buffer
        self._timeout_s = timeout_s
        self._links: dict[int, _Link] = {}

    def invite(self, ranks: Sequence[int], send: Exchange) -> None:
        """Say that the buffer may be written and, to ranks that do not know it, where it is."""
        _finish_work(self.buffer.device)
        if strangers := [rank for rank in ranks if rank not in self._links]:
            self._meet(strangers, send)
        for rank in ranks:
            self._links[rank].send(_SIGNAL)

    def wait(self, ranks: Sequence[int]) -> None:
        """Wait until the ranks have written."""
        for rank in ranks:
            self._links[rank].receive(len(_SIGNAL))

    def close(self) -> None:
        """Leave; ranks that wait for this one fail."""
        for link in self._links.values():
            link.close()

    def _meet(self, ranks: Sequence[int], send: Exchange) -> None:
        # Other users cannot enter the folder.
        with tempfile.TemporaryDirectory(prefix="megappo-") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "gather")
            try:
                listener.settimeout(self._timeout_s)
                listener.bind(address)
                listener.listen(len(ranks))
                send({rank: self._invitation(address) for rank in ranks})
                for _ in ranks:
                    link = _Link(listener.accept()[0], timeout_s=self._timeout_s)
                    self._links[int.from_bytes(link.receive(_NUMBER_BYTES), "little")] = link
            except OSError as error:
                raise WorkerError(f"shared gather: meeting ranks {list(ranks)} at {address}: {error}") from error

    def _invitation(self, address: str) -> torch.Tensor:
        length = len(self.buffer)
        meta = BucketMeta(names=[_NAME], shapes=[[length]], dtype="uint8", num_bytes=length)
        content = _framed(address.encode()) + _framed(share_bucket(meta, self.buffer))
        assert len(content) <= MESSAGE_BYTES, f"an invitation of {len(content)} bytes"
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return message.to(self.buffer.device)


class BufferGuest:
    """The end of a rank that feeds, in one hand-over. Raises WorkerError where the sender has left or is late."""

    def __init__(self, device: torch.device, *, rank: int, timeout_s: float) -> None:
        """`rank` is its own; `timeout_s` is the longest wait for the sender."""
        self._device = device
        self._rank = rank
        self._timeout_s = timeout_s
        self._link: _Link | None = None
        self._buffer: torch.Tensor | None = None

    def wait(self, receive: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Wait until the buffer may be written, and return it. `receive` takes the invitation."""
        if self._link is None:
            message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=self._device)
            receive(message)
            address, payload = _unframed(bytes(message.tolist()))
            self._link = self._connect(address.decode())
            self._buffer = open_shared_bucket(payload)[_NAME]
        assert self._buffer is not None
        self._link.receive(len(_SIGNAL))
        return self._buffer

    def _connect(self, address: str) -> "_Link":
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(address)
        except OSError as error:
            end.close()
            raise WorkerError(f"shared gather: meeting the sender at {address}: {error}") from error
        link = _Link(end, timeout_s=self._timeout_s)
        link.send(self._rank.to_bytes(_NUMBER_BYTES, "little"))
        return link

    def done(self) -> None:
        """Say that this rank has written."""
        _finish_work(self._device)
        assert self._link is not None
        self._link.send(_SIGNAL)

    def close(self) -> None:
        """Leave; a sender that waits for this rank fails."""
        if self._link is not None:
            self._link.close()


class _Link:
    """A connection of two ranks. Every call raises WorkerError."""

    def __init__(self, end: socket.socket, *, timeout_s: float) -> None:
        end.settimeout(timeout_s)
        self._end = end

    def send(self, content: bytes) -> None:
        """Send a few bytes, which arrive together."""
        try:
            self._end.sendall(content)
        except OSError as error:
            raise WorkerError(f"shared gather: the other rank cannot be told to go on: {error}") from error

    def receive(self, length: int) -> bytes:
        """Return what `send` sent."""
        try:
            content = self._end.recv(length)
        except OSError as error:
            raise WorkerError(f"shared gather: waiting for the other rank: {error}") from error
        if len(content) < length:
            raise WorkerError("shared gather: the other rank has left")
        return content

    def close(self) -> None:
        self._end.close()


def _finish_work(device: torch.device) -> None:
    """Wait for the device: what another process does next does not wait for this one's stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(_NUMBER_BYTES, "little") + content


def _unframed(message: bytes) -> list[bytes]:
    """Return the parts that `_framed` made, up to an empty one."""
    parts: list[bytes] = []
    while length := int.from_bytes(message[:_NUMBER_BYTES], "little"):
        parts.append(message[_NUMBER_BYTES : _NUMBER_BYTES + length])
        message = message[_NUMBER_BYTES + length :]
    return parts
