"""How Megatron lays parameters into flat buffers, and which part of one a data-parallel rank steps.

Source: megatron-core 0.16.1, distributed/param_and_grad_buffer.py:564 (`_ParamAndGradBuffer`): parameters in reverse
order; with a distributed optimizer each begins at a multiple of 64 elements and a bucket ends at a multiple of
lcm(data-parallel ranks, 128), so that all ranks get as much. tests/planning holds every number against a built model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from megappo.planning.parameters import LocalParameter

_PARAMETER_MULTIPLE = 64
_BUCKET_MULTIPLE = 128
_LEAST_BUCKET = 40_000_000
"""Parameters of a bucket where the configuration names no number (distributed_data_parallel.py:61)."""
_LEAST_BUCKET_PER_RANK = 1_000_000


@dataclass(kw_only=True, slots=True, frozen=True)
class BufferLayout:
    """One flat buffer."""

    elements: int
    """Padding included."""
    places: tuple[tuple[int, int], ...]
    """First and last-but-one element of each parameter."""
    buckets: tuple[tuple[int, int], ...]
    """The same of each bucket, padding included."""

    def owned(self, rank: int, ranks: int) -> int:
        """Return the elements of parameters that data-parallel rank `rank` of `ranks` steps with a distributed
        optimizer: its even share of every bucket, less the padding in it."""
        total = 0
        for start, stop in self.buckets:
            share = (stop - start) // ranks
            first = start + rank * share
            total += sum(max(0, min(end, first + share) - max(begin, first)) for begin, end in self.places)
        return total


def lay_out(
    parameters: Sequence[LocalParameter], *, distributed: bool, ranks: int, bucket_elements: int | None
) -> BufferLayout:
    """Return the buffer of the parameters, given in Megatron's order.

    Args:
        distributed: whether the optimizer is.
        ranks: data-parallel ranks that share the buffer.
        bucket_elements: elements at which a bucket is full; None: one bucket.
    """
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = end = 0

    def close(stop: int) -> int:
        nonlocal bucket_start
        padded = _padded(stop, lcm(ranks, _BUCKET_MULTIPLE)) if distributed else stop
        buckets.append((bucket_start, padded))
        bucket_start = padded
        return padded

    is_open = False
    for parameter in reversed(parameters):
        start = _padded(end, _PARAMETER_MULTIPLE) if distributed else end
        stands_alone = parameter.has_own_bucket and distributed
        if stands_alone and is_open:
            start, is_open = close(start), False
        end = start + parameter.elements
        places.append((start, end))
        is_open = True
        if stands_alone or (bucket_elements is not None and end - bucket_start >= bucket_elements):
            end, is_open = close(end), False
    if is_open:
        end = close(end)
    return BufferLayout(elements=end, places=tuple(places), buckets=tuple(buckets))


def bucket_elements(*, wanted: int | None, ranks: int) -> int:
    """Return the parameters of a bucket: what the configuration names, else Megatron's choice for so many ranks."""
    return wanted if wanted is not None else max(_LEAST_BUCKET, _LEAST_BUCKET_PER_RANK * ranks)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
