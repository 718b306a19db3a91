"""One process of the trainer in a hand-over: it takes its buckets one after the other, checksums, and sends them."""

import re
from collections.abc import Iterable, Sequence, Set

from megappo.errors import WorkerError
from megappo.weight_sync.transport import Bucket, WeightSender
from megappo.weights.checksums import HeldTensor, SentChecksums


class WeightSource:
    """The buckets that one process sends in one hand-over. It may send none, and only feed the buckets of others while
    it iterates."""

    def __init__(
        self, buckets: Iterable[Bucket], sender: WeightSender | None, *, wanted: Sequence[HeldTensor] = ()
    ) -> None:
        """`wanted` are the tensors whose checksums are taken, of this source or of others."""
        self._buckets = iter(buckets)
        self._sender = sender
        self._checksums = SentChecksums(wanted)

    def send_next(self) -> dict[int, bytes]:
        """Send one bucket; returns what engine ranks need to open it."""
        return self._send(*next(self._buckets))

    def send_rest(self) -> dict[str, str]:
        """Send all that is left; returns the checksums of the wanted tensors that this process sent whole."""
        for bucket in self._buckets:
            self._send(*bucket)
        return self._checksums.result()

    def drop_rest(self) -> None:
        """Take all that is left without sending it: ranks that feed this source wait until their part is taken, and
        this one may have others to feed."""
        for _ in self._buckets:
            pass

    def _send(self, *bucket: *Bucket) -> dict[int, bytes]:
        """Send one bucket. Where that fails, the rest is dropped, so that no other rank waits for this one."""
        meta, flat = bucket
        assert self._sender is not None, f"nothing to send the bucket from {meta.names[0]} with"
        self._checksums.see(meta, flat)
        try:
            return self._sender.send(meta, flat)
        except Exception as error:
            self.drop_rest()
            if isinstance(error, RuntimeError):  # torch's, of a broken group
                raise WorkerError(f"bucket from {meta.names[0]}: send: {error}") from error
            raise


def comparable(held: Sequence[HeldTensor], sent: Sequence[Set[str]]) -> list[HeldTensor]:
    """Return the held tensors of which one source sends all parts, since that source computes the checksum. Experts
    that an engine joins come from several where the trainer has several expert-parallel ranks.

    Args:
        sent: the names of the tensors that each source sends.
    """
    return [tensor for tensor in held if any({part.name for part in tensor.parts} <= names for names in sent)]


def uncompared(held: Sequence[HeldTensor], sent: Sequence[Set[str]]) -> list[str]:
    """Return the names that are sent and are of no part of these tensors; numbers of layers and experts read `*`."""
    names = set[str]().union(*sent) - {part.name for tensor in held for part in tensor.parts}
    return sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})
