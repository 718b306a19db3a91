"""Devices, pools and which role runs where."""

from dataclasses import dataclass, field
from enum import Enum


class DeviceKind(Enum):
    """Back end of all training processes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Device pools. A device is one GPU, or on CPU one process slot; roles of one pool share its devices."""

    device: DeviceKind = DeviceKind.auto
    """auto: cuda where torch sees a GPU, else cpu."""
    pools: dict[str, int] = field(default_factory=dict[str, int])
    """Pool name -> number of devices. `placement=colocated` and `placement=split` set these and the roles' pools."""
    actor: str = "main"
    """Pool of the actor (and reference)."""
    critic: str = "main"
    rollout: str = "main"
    reward: str = "main"
    """Pool of reward-model workers; rule rewards run on CPUs."""
    address: str | None = None
    """Address of a running Ray cluster; None: start Ray on this machine."""
    num_cpus: int | None = None
    """CPUs that a Ray started here may hand out; None: as many as the roles need."""
    start_timeout_s: float = 300.0
    """Longest wait for devices and for workers to start."""
    call_timeout_s: float = 1800.0
    """Longest wait for one phase of training workers (log-probs, update, save...)."""
    check_memory: bool = True
    """Refuse a run on GPUs whose weights, gradients, optimizer state and engines cannot fit into their memory."""
    object_store_bytes: int = 256 * 1024**2
    """Object store of a Ray started here."""
