"""Rules about what this version cannot do: asked for, it is refused here and not deep in a worker."""

from megappo.config.cluster import DeviceKind
from megappo.config.run import RunConfig
from megappo.errors import Violation


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
