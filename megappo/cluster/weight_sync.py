"""The hand-over of weights: one process group per exporting pipeline stage, engines on its other ranks."""

import time

from megappo.cluster.groups import ActorGroup
from megappo.cluster.rollout_pool import RolloutPool
from megappo.cluster.runtime import gather
from megappo.config.run import RunConfig
from megappo.observability.metrics import Metrics, maximum, total


class BroadcastWeightSync:
    """Pushes the actor's weights to all engines (port: WeightSync)."""

    def __init__(self, config: RunConfig, *, actor: ActorGroup, rollout: RolloutPool, backend: str) -> None:
        """Plan the hand-over and join the weight groups: `backend` is gloo or nccl."""
        self._actor = actor
        self._rollout = rollout
        self._bucket_bytes = config.weight_sync.bucket_bytes
        self._timeout_s = config.weight_sync.timeout_s
        plans = actor.run("weight_manifest", self._bucket_bytes)
        self._stages = []
        for rank, plan in enumerate(plans):
            if plan.sends:
                self._connect(rank, plan.stage, backend)
                self._stages.append(plan.stage_source())
        self._num_bytes = sum(bucket.num_bytes for stage in self._stages for bucket in stage.buckets)

    def _connect(self, rank: int, stage: int, backend: str) -> None:
        """Join the group of one stage: the sending rank is rank 0, the engines follow."""
        address, port = gather([self._actor.call(rank, "rendezvous")], phase="weight group", timeout_s=30.0)[0]
        name = f"weights-{stage}"
        world_size = 1 + self._rollout.num_ranks
        calls = self._rollout.join_weight_group(name=name, address=address, port=port, backend=backend)
        calls.append(self._actor.call(rank, "join_weight_group", name, address, port, world_size))
        gather(calls, phase="join weight group", timeout_s=self._timeout_s)

    def push(self, version: int) -> Metrics:
        """Hand over all weights as `version`."""
        start = time.perf_counter()
        calls = self._actor.calls("send_weights", self._bucket_bytes)
        calls += self._rollout.calls("receive_weights", self._stages, version)
        gather(calls, phase="weight hand-over", timeout_s=self._timeout_s + 30.0)
        seconds = time.perf_counter() - start
        return {
            "weights/version": maximum(version),
            "weights/bytes": total(self._num_bytes),
            "perf/weight_sync_bytes_per_s": total(self._num_bytes / seconds),
        }
