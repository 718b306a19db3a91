"""Rules about what this version cannot do: asked for, it is refused here and not deep in a worker."""

from megappo.config.cluster import DeviceKind
from megappo.config.layout_rules import trained_models
from megappo.config.run import RunConfig
from megappo.errors import Violation


def sequences_stay_whole(config: RunConfig) -> list[Violation]:
    """Context parallelism is not built for packed sequences."""
    return [
        Violation(
            key=f"{role}.parallelism.context",
            value=layout.context,
            rule="must be 1: packed sequences are not split over ranks",
            remedy=f"use {role}.parallelism.tensor with sequence=true for long sequences",
        )
        for role, layout, _ in trained_models(config)
        if layout.context != 1
    ]


def experts_stay_together(config: RunConfig) -> list[Violation]:
    """There is no mixture-of-experts family to spread."""
    return [
        Violation(
            key=f"{role}.parallelism.{key}",
            value=value,
            rule="must be 1: no family with experts can be trained",
            remedy="remove it",
        )
        for role, layout, _ in trained_models(config)
        for key, value in (("expert", layout.expert), ("expert_tensor", layout.expert_tensor))
        if value != 1
    ]


def broadcast_needs_devices_of_its_own(config: RunConfig) -> list[Violation]:
    """NCCL refuses a group with two ranks on one GPU, so trainer and engine cannot share one and broadcast."""
    cluster = config.cluster
    if cluster.device is not DeviceKind.cuda or config.weight_sync.transport != "broadcast":
        return []
    if cluster.rollout != cluster.actor:
        return []
    return [
        Violation(
            key="cluster.rollout",
            value=cluster.rollout,
            rule="is the actor's pool, and weight_sync.transport=broadcast needs GPUs of its own for the engines",
            remedy="use cluster=gpu, or name another pool",
        )
    ]
