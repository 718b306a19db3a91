"""Rules about the hand-over of weights: which transport suits which devices, and what an engine can do meanwhile."""

from megappo.config.cluster import DeviceKind
from megappo.config.rollout import PauseMode
from megappo.config.run import RunConfig
from megappo.config.trainer import ControllerKind
from megappo.errors import Violation


def broadcast_needs_devices_of_its_own(config: RunConfig) -> list[Violation]:
    """NCCL refuses a group with two ranks on one GPU, so trainer and engine cannot share one and broadcast."""
    cluster = config.cluster
    if cluster.device is not DeviceKind.cuda or config.weight_sync.transport != "broadcast":
        return []
    if cluster.rollout != cluster.actor or config.rollout.urls:
        return []
    return [
        Violation(
            key="cluster.rollout",
            value=cluster.rollout,
            rule="is the actor's pool, and weight_sync.transport=broadcast needs GPUs of its own for the engines",
            remedy="use weight_sync.transport=ipc, or placement=split, or name another pool",
        )
    ]


def shared_memory_needs_shared_devices(config: RunConfig) -> list[Violation]:
    """A CUDA handle is opened on the device that it names, so an engine must see every device that sends.

    That they all are on one machine is known only when the run has its devices (`cluster.hand_over`).
    """
    cluster = config.cluster
    if cluster.device is not DeviceKind.cuda or config.weight_sync.transport != "ipc":
        return []
    if cluster.rollout != cluster.actor:
        return [
            Violation(
                key="cluster.rollout",
                value=cluster.rollout,
                rule=f"is not the actor's pool {cluster.actor!r}, and weight_sync.transport=ipc shares its memory",
                remedy="use placement=colocated, or weight_sync.transport=broadcast",
            )
        ]
    devices, ranks = cluster.pools.get(cluster.actor), config.rollout.num_engines * config.rollout.tensor
    if devices is None or config.rollout.tensor < 1 or ranks == devices:
        return []
    return [
        Violation(
            key="rollout.num_engines",
            value=config.rollout.num_engines,
            rule=f"x rollout.tensor={config.rollout.tensor} leaves devices of the {devices} of pool {cluster.actor!r} "
            "without an engine, which weight_sync.transport=ipc needs on all of them",
            remedy=f"use rollout.num_engines={max(devices // config.rollout.tensor, 1)}, or weight_sync.transport=disk",
        )
    ]


def disk_needs_a_folder_that_all_see(config: RunConfig) -> list[Violation]:
    """On a cluster the folder of the run is one of the machine that leads it."""
    if config.weight_sync.transport != "disk" or config.weight_sync.folder or config.cluster.address is None:
        return []
    return [
        Violation(
            key="weight_sync.folder",
            value=config.weight_sync.folder,
            rule=f"must name a folder that all machines of cluster.address={config.cluster.address} see, with "
            "weight_sync.transport=disk",
            remedy="set it to one on a shared file system",
        )
    ]


def pauses_need_something_to_pause(config: RunConfig) -> list[Violation]:
    """The synchronous loop hands weights over when nothing is under way, and an engine that samples batch by batch has
    no cache to go on from."""
    pause = config.weight_sync.pause
    if pause is PauseMode.wait:
        return []
    if config.controller is ControllerKind.synchronous:
        rule, remedy = (
            "has no use: controller=synchronous hands weights over when no sequence is under way",
            "use wait, or controller=one_step_off; rollout.partial.extra_prompts stops sequences and goes on later",
        )
    elif config.rollout.engine == "hf" and pause is not PauseMode.abort:
        rule, remedy = "needs an engine that can set sequences aside, unlike rollout.engine=hf", "use wait or abort"
    else:
        return []
    return [Violation(key="weight_sync.pause", value=pause.value, rule=rule, remedy=remedy)]
