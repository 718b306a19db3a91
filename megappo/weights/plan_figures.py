"""What a hand-over costs by each route, from its plan alone: bytes, calls, extra memory, least time.

- broadcast: every engine rank gets whole tensors; the sources send one after the other.
- ipc: every engine rank copies what it holds out of memory that it shares with the trainer's ranks.
- disk: the sources write the tensors at the same time, then every engine reads them.

GB is 10^9 bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megappo.weights.buckets import fewest_buckets
from megappo.weights.engine_shards import EngineShard, engine_shards
from megappo.weights.plan import PlannedBucket, PlannedTensor, WeightPlan, WeightSource

ROUTES = ("broadcast", "ipc", "disk")

Printed = dict[str, Any]  # Any: values of a JSON object


def describe_plan(plan: WeightPlan, *, links: Mapping[str, float], num_engines: int = 1) -> Printed:
    """Return the figures of a plan as a JSON object.

    Args:
        links: route -> GB/s of the link into an engine rank (disk: of one writer or reader); routes that are not named
            have no least time.
        num_engines: engines that get the weights, each from ranks of its own by `ipc`.
    """
    tensors = [tensor for source in plan.sources for bucket in source.buckets for tensor in bucket.tensors]
    largest = max(tensor.meta.num_bytes for tensor in tensors)
    return {
        "tensors": len(tensors),
        "bytes": sum(tensor.meta.num_bytes for tensor in tensors),
        "largest_tensor_bytes": largest,
        "bucket_bytes": plan.bucket_bytes,
        "calls": sum(len(source.buckets) for source in plan.sources),
        "fewest_calls": sum(_fewest(source, plan.bucket_bytes) for source in plan.sources),
        "fill": _fill(
            [bucket for source in plan.sources for bucket in _full(source, plan.bucket_bytes)], plan.bucket_bytes
        ),
        "peak_limit_bytes": 2 * max(plan.bucket_bytes, largest),
        "sources": [_source(source, plan.bucket_bytes, links.get("broadcast")) for source in plan.sources],
        "routes": {
            "broadcast": _broadcast(plan, links.get("broadcast")),
            "ipc": _ipc(plan, tensors, links.get("ipc"), num_engines),
            "disk": _disk(plan, links.get("disk")),
        },
    }


def describe_tensors(plan: WeightPlan) -> list[Printed]:
    """Return the table of all tensors, in the order of the hand-over, as JSON objects."""
    return [
        {
            "name": tensor.name,
            "shape": tensor.meta.shape,
            "dtype": tensor.meta.dtype,
            "bytes": tensor.meta.num_bytes,
            "source": index,
            "bucket": number,
            "cut_dim": tensor.partition.value,
            "merges_adapter": tensor.merges_adapter,
            "pieces": [[piece.rank, piece.start, piece.stop] for piece in tensor.pieces],
            "engine": [_shard(shard) for shard in engine_shards(plan, tensor)],
        }
        for index, source in enumerate(plan.sources)
        for number, bucket in enumerate(source.buckets)
        for tensor in bucket.tensors
    ]


def _shard(shard: EngineShard) -> Printed:
    return {
        "rank": shard.rank,
        "parameter": shard.name,
        "expert": shard.expert,
        "first_row": shard.offset,
        "start": shard.start,
        "stop": shard.stop,
        "bytes": shard.num_bytes,
        "from": [[piece.rank, piece.start, piece.stop] for piece in shard.feeds],
    }


def _source(source: WeightSource, bucket_bytes: int, speed: float | None) -> Printed:
    return {
        "stage": source.stage,
        "expert_rank": source.expert_rank,
        "sender": source.sender,
        "ranks": sorted(source.ranks),
        "bytes": source.num_bytes,
        "gathered_bytes": source.num_bytes - sum(bucket.bytes_of(source.sender) for bucket in source.buckets),
        "calls": len(source.buckets),
        "fewest_calls": _fewest(source, bucket_bytes),
        "fill": _fill(_full(source, bucket_bytes), bucket_bytes),
        "peak_extra_bytes": source.bucket_buffer + source.receive_buffer,
        "least_s": _seconds(source.num_bytes, speed),
    }


def _broadcast(plan: WeightPlan, speed: float | None) -> Printed:
    total = sum(source.num_bytes for source in plan.sources)
    trainer: Counter[int] = Counter()
    for source in plan.sources:
        # One source after the other, each with buffers of its own.
        trainer |= Counter({source.sender: source.bucket_buffer + source.receive_buffer, **source.part_buffers})
    return {
        "bytes_per_engine_rank": total,
        "calls": sum(len(source.buckets) for source in plan.sources),
        "peak_extra_bytes": {
            "trainer": {str(rank): trainer[rank] for rank in sorted(trainer)},
            "engine": max(source.bucket_buffer for source in plan.sources),
        },
        "least_s": _seconds(total, speed),
    }


def _ipc(plan: WeightPlan, tensors: Sequence[PlannedTensor], speed: float | None, num_engines: int) -> Printed:
    received: Counter[int] = Counter()
    read: Counter[int] = Counter()
    # Those of all layers and experts on the same ranks are alike: only their names differ.
    alike: dict[object, list[PlannedTensor]] = {}
    for tensor in tensors:
        key = tensor.cut, tensor.partition, tuple(tensor.meta.shape), tensor.pieces
        alike.setdefault(key, []).append(tensor)
    for tensor, count in ((group[0], len(group)) for group in alike.values()):
        for shard in engine_shards(plan, tensor):
            received[shard.rank] += shard.num_bytes * count
            for piece in shard.feeds:
                read[piece.rank] += tensor.bytes_of(piece.stop - piece.start) * num_engines * count
    shared: Counter[int] = Counter()
    for source in plan.sources:
        for rank in source.ranks:
            shared |= Counter({rank: max(bucket.bytes_of(rank) for bucket in source.buckets)})
    return {
        "bytes_per_engine_rank": {str(rank): received[rank] for rank in sorted(received)},
        "bytes_read_per_trainer_rank": {str(rank): read[rank] for rank in sorted(read)},
        "calls": sum(len(source.buckets) for source in plan.sources),
        "peak_extra_bytes": {"trainer": {str(rank): shared[rank] for rank in sorted(shared)}, "engine": 0},
        "least_s": _seconds(max([*received.values(), *read.values()]), speed),
    }


def _disk(plan: WeightPlan, speed: float | None) -> Printed:
    total = sum(source.num_bytes for source in plan.sources)
    gathered = _broadcast(plan, None)
    return {
        "bytes_written": total,
        "bytes_per_engine_rank": total,
        "files": gathered["calls"],
        "peak_extra_bytes": gathered["peak_extra_bytes"],
        "least_s": _seconds(max(source.num_bytes for source in plan.sources) + total, speed),
    }


def _seconds(num_bytes: int, speed: float | None) -> float | None:
    return None if speed is None else num_bytes / (speed * 1e9)


def _fewest(source: WeightSource, bucket_bytes: int) -> int:
    return sum(
        fewest_buckets([tensor.meta.num_bytes for bucket in kind for tensor in bucket.tensors], bucket_bytes)
        for kind in _kinds(source)
        if kind
    )


def _kinds(source: WeightSource) -> list[list[PlannedBucket]]:
    """Return the buckets of experts and the others, which are packed apart."""
    return [[bucket for bucket in source.buckets if bucket.is_of_experts is kind] for kind in (False, True)]


def _full(source: WeightSource, bucket_bytes: int) -> list[PlannedBucket]:
    """Return the buckets that fill is measured over: without tensors larger than a bucket, which are alone, and without
    the least one of each kind, which has what is left."""
    counted: list[PlannedBucket] = []
    for kind in _kinds(source):
        limited = [bucket for bucket in kind if bucket.meta.num_bytes <= bucket_bytes]
        counted += sorted(limited, key=lambda bucket: bucket.meta.num_bytes)[1:]
    return counted


def _fill(buckets: Sequence[PlannedBucket], bucket_bytes: int) -> float | None:
    """Return the mean share of a bucket that is used, over these buckets; None: there are none."""
    return sum(bucket.meta.num_bytes for bucket in buckets) / (len(buckets) * bucket_bytes) if buckets else None
