"""Weights from four tensor-parallel trainer ranks to two engine ranks on one machine: copies, bytes, memory.

Run by `make bench NAME=weight_sync`; see benchmarks/README.md. Trainer ranks are the real export of a real model; an
engine rank copies what it holds into parameters fused as SGLang's, which is what SGLang's loader does.
"""

from collections.abc import Mapping
from functools import partial

import torch

from benchmarks.harness import Case, Contender, Goal, Ratio, run_program
from benchmarks.memory import METHOD
from benchmarks.weight_sync_world import ENGINES, TRAINERS, Sizes, World
from megappo.weights.buckets import fewest_buckets
from megappo.weights.plan_figures import describe_plan


def make_reshard(quick: bool) -> Case:
    """Shard to shard through shared memory, against gathering the model on every rank."""
    sizes = _sizes(quick)
    world = World(sizes)
    plan = sizes.plan()
    num_bytes = sum(source.num_bytes for source in plan.sources)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    shard = max(describe_plan(plan, links={})["routes"]["ipc"]["bytes_per_engine_rank"].values())

    def figures(_: Mapping[str, object]) -> dict[str, float]:
        ipc, gathered = (world.run(kind, checked=True) for kind in ("ipc", "full_gather"))
        engines = ipc[TRAINERS:]
        peaks = [answer.peak_bytes for answer in ipc[:TRAINERS]]
        return {
            "received bytes, share of a shard": max(engine.received_bytes for engine in engines) / shard,
            "engines that hold other weights than by full gather": float(
                sum(one.checksum != other.checksum for one, other in zip(engines, gathered[TRAINERS:]))
            ),
            "extra peak of a trainer rank by ipc, share of a bucket": max(peaks) / sizes.bucket_bytes,
            "MB": num_bytes / 1e6,
        }

    return Case(
        key="reshard",
        question="from 4 to 2 shards through shared memory",
        sizes=sizes.describe() | {"trainer ranks": TRAINERS, "engine ranks": ENGINES, "memory": METHOD},
        contenders=[
            Contender(name="full gather", run=partial(world.run, "full_gather")),
            Contender(name="ipc", run=partial(world.run, "ipc")),
            Contender(name="memcpy", run=partial(target.copy_, source)),
        ],
        ratios=[
            Ratio(name="ipc, times memcpy", numerator="ipc", denominator="memcpy"),
            Ratio(name="full gather, times memcpy", numerator="full gather", denominator="memcpy"),
        ],
        goals=[
            Goal(figure="ipc, times memcpy", at_most=2.5),
            Goal(figure="received bytes, share of a shard", at_most=1.0),
            Goal(figure="engines that hold other weights than by full gather", at_most=0.0),
        ],
        quantities=figures,
    )


def make_broadcast(quick: bool) -> Case:
    """Whole tensors, gathered one bucket at a time and broadcast to the engines over gloo."""
    sizes = _sizes(quick)
    world = World(sizes)
    plan = sizes.plan()
    described = describe_plan(plan, links={})
    tensors = [
        tensor.meta.num_bytes for source in plan.sources for bucket in source.buckets for tensor in bucket.tensors
    ]

    def figures(_: Mapping[str, object]) -> dict[str, float]:
        answers = world.run("broadcast", checked=True)
        limit = max(sizes.bucket_bytes, described["largest_tensor_bytes"])
        trainers = answers[:TRAINERS]
        return {
            "extra peak of a trainer rank, share of a bucket": max(answer.peak_bytes for answer in trainers) / limit,
            "gathers per bucket": sum(answer.calls for answer in trainers) / described["calls"],
            "fill": described["fill"] or 1.0,
            "buckets, share of the fewest": described["calls"] / fewest_buckets(tensors, sizes.bucket_bytes),
            "buckets": float(described["calls"]),
        }

    return Case(
        key="broadcast",
        question="whole tensors over gloo, one bucket at a time",
        sizes=sizes.describe() | {"trainer ranks": TRAINERS, "engine ranks": ENGINES, "memory": METHOD},
        contenders=[Contender(name="broadcast", run=partial(world.run, "broadcast"))],
        goals=[
            Goal(figure="extra peak of a trainer rank, share of a bucket", at_most=2.0),
            Goal(figure="gathers per bucket", at_most=1.0),
            Goal(figure="fill", at_least=0.9),
        ],
        quantities=figures,
    )


def _sizes(quick: bool) -> Sizes:
    return Sizes(num_layers=2, hidden_size=256, ffn_hidden_size=704, bucket_bytes=2 * 1024**2) if quick else Sizes()


def main() -> None:
    """Measure the chosen cases."""
    run_program("weight_sync", {"reshard": make_reshard, "broadcast": make_broadcast}, packages=["torch"])


if __name__ == "__main__":
    main()
