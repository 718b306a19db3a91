"""The hand-over of weights: one process group per exporting pipeline stage, engines on its other ranks.

Sources and engines work at the same time; `megappo.weight_sync.push` holds the order of the engines' side.
"""

import time

from megappo.cluster.groups import ActorGroup
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.runtime import gather
from megappo.config.run import RunConfig
from megappo.observability.metrics import Metrics, maximum, total
from megappo.weight_sync.push import StageSource


class RayWeightSync:
    """Pushes the actor's weights to all engines (port: WeightSync)."""

    def __init__(self, config: RunConfig, *, actor: ActorGroup, rollout: RolloutPool, backend: str) -> None:
        """Plan the hand-over and join the weight groups; `backend` is gloo or nccl."""
        self._actor = actor
        self._rollout = rollout
        self._timeout_s = config.weight_sync.timeout_s
        self._stages: list[StageSource] = []
        self._senders: list[int] = []
        for rank, (stage, takes_part, sends, buckets) in enumerate(actor.run("plan_export")):
            if takes_part:
                self._senders.append(rank)
            if sends:
                group = f"weights-{stage}"
                self._connect(rank, group, backend)
                self._stages.append(StageSource(group=group, buckets=buckets))
        self._num_bytes = sum(bucket.num_bytes for stage in self._stages for bucket in stage.buckets)

    def _connect(self, rank: int, group: str, backend: str) -> None:
        """Join the group of one stage: the sending rank is rank 0, the engines follow."""
        address, port = gather([self._actor.call(rank, "rendezvous")], phase="weight group", timeout_s=30.0)[0]
        calls = self._rollout.join_weight_group(name=group, address=address, port=port, backend=backend)
        world_size = 1 + self._rollout.num_ranks
        calls.append(self._actor.call(rank, "join_weight_group", group, address, port, world_size))
        gather(calls, phase="join weight group", timeout_s=self._timeout_s)

    def push(self, version: int) -> Metrics:
        """Hand over all weights as `version`; every engine then answers with it."""
        start = time.perf_counter()
        # The sources first: an engine that waits for a bucket nobody sends is stuck until its deadline.
        calls = [self._actor.call(rank, "send_weights") for rank in self._senders]
        calls += self._rollout.calls("receive_weights", self._stages, version)
        num_buckets = sum(len(stage.buckets) for stage in self._stages)
        gather(calls, phase="weight hand-over", timeout_s=self._timeout_s * (num_buckets + 3) + 30.0)
        seconds = time.perf_counter() - start
        return {
            "weights/version": maximum(version),
            "weights/bytes": total(self._num_bytes),
            "perf/weight_sync_bytes_per_s": total(self._num_bytes / seconds),
        }
