"""The memory of a run over its devices: which are alike, which is the fullest, and what would help."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from megappo.config.layout_rules import trained_models
from megappo.planning.phases import Item, Phase, PhaseMemory, RunMemory
from megappo.planning.placement import Device, Placement


@dataclass(kw_only=True, slots=True, frozen=True)
class Unit:
    """A unit of memory."""

    name: str
    size: int


UNITS = tuple(Unit(name=name, size=1024**power) for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")))

TIGHT_SHARE = 0.1
"""Share of a device that should be left for what is not counted."""

NOT_COUNTED = (
    "activations of forward and backward passes, and logits of a tile",
    "the CUDA context of each process (about 0.5 GiB) and buffers of NCCL",
    "workspace of kernels, CUDA graphs and copies of weights in fp8",
    "memory that an allocator keeps or loses to fragmentation",
    "torch, Ray and what Python processes take of the host",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceGroup:
    """Devices that hold the same."""

    devices: tuple[tuple[int, int], ...]
    """(node, index on the node), in order."""
    labels: tuple[str, ...]
    """Of the first of them, what is on it."""
    phases: tuple[PhaseMemory, ...]

    @property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryPlan:
    """All devices that the run uses."""

    device_bytes: int | None
    """Memory of one device; None: not known."""
    groups: tuple[DeviceGroup, ...]
    host: Mapping[Phase, int]
    """Phase -> most bytes of the host memory of one node."""
    levers: tuple[str, ...]
    """What would make the fullest device less full, the largest effect first; empty where it fits well."""

    @property
    def worst(self) -> DeviceGroup:
        """The group of the fullest devices."""
        return max(self.groups, key=lambda group: group.fullest.total)

    @property
    def free(self) -> float:
        """Bytes that the fullest device has left in its fullest phase; infinite: memory is not known."""
        return inf if self.device_bytes is None else self.device_bytes - self.worst.fullest.total

    @property
    def verdict(self) -> str:
        """`fits`, `tight`, `does not fit` or `unknown`."""
        if self.device_bytes is None:
            return "unknown"
        if self.free < 0:
            return "does not fit"
        return "tight" if self.free < TIGHT_SHARE * self.device_bytes else "fits"

    @property
    def worst_line(self) -> str:
        """What to say of the fullest device in one line."""
        worst = self.worst
        (node, index), fullest = worst.devices[0], worst.fullest
        parts = sorted(fullest.items, key=lambda item: -item.bytes)
        held = ", ".join(f"{item.role} {item.what} {human(item.bytes)}" for item in parts)
        of = "" if self.device_bytes is None else f" of {human(self.device_bytes)}"
        return (
            f"node {node} device {index} ({', '.join(worst.labels)}) needs {human(fullest.total)}{of} "
            f"in phase {fullest.phase.value}: {held}"
        )


def plan_memory(run: RunMemory, placement: Placement, device_bytes: int | None) -> MemoryPlan:
    """Return the memory of all devices that the run uses."""
    groups: dict[tuple[tuple[str, int], ...], list[Device]] = defaultdict(list)
    phases_of: dict[tuple[tuple[str, int], ...], list[PhaseMemory]] = {}
    host: dict[tuple[Phase, int], int] = defaultdict(int)
    for device in placement.devices:
        if not device.seats:
            continue
        phases = run.on_device(device)
        key = tuple((f"{phase.phase}/{item.role}/{item.what}", item.bytes) for phase in phases for item in phase.items)
        groups[key].append(device)
        phases_of.setdefault(key, phases)
        for phase in phases:
            host[phase.phase, device.node] += phase.host_total
    plan = MemoryPlan(
        device_bytes=device_bytes,
        groups=tuple(
            DeviceGroup(
                devices=tuple((device.node, device.index) for device in devices),
                labels=tuple(seat.label for seat in devices[0].seats),
                phases=tuple(phases_of[key]),
            )
            for key, devices in groups.items()
        ),
        host={phase: max(size for (of, _), size in host.items() if of is phase) for phase in run.phases()},
        levers=(),
    )
    if plan.verdict in ("fits", "unknown"):
        return plan
    return MemoryPlan(
        device_bytes=device_bytes,
        groups=plan.groups,
        host=plan.host,
        levers=tuple(_levers(run, plan.worst.fullest)),
    )


def _levers(run: RunMemory, fullest: PhaseMemory) -> list[str]:
    """Return what would make a device less full, by the size of what it would move."""
    found: list[str] = []
    for item in sorted(fullest.items, key=lambda item: -item.bytes):
        for lever in _levers_of(item, run, fullest.phase):
            if lever not in found:
                found.append(lever)
    return found


def _levers_of(item: Item, run: RunMemory, phase: Phase) -> list[str]:
    config = run.config
    if item.role == "rollout":
        return {
            "KV cache": ["lower rollout.sglang.mem_fraction_static"],
            "weights": ["raise rollout.tensor, so that more devices share an engine"],
        }.get(item.what, ["lower weight_sync.bucket_bytes"])
    if item.role not in ("actor", "critic"):
        return [f"raise {item.role}.parallelism.tensor, or set {item.role}.offload.params=true"]
    training = config.actor if item.role == "actor" else config.critic
    layout, offload, found = training.parallelism, training.offload, list[str]()
    is_state = item.what in ("master weights", "optimizer state")
    devices = {role: config.cluster.pools[pool] for role, _, pool in trained_models(config)}
    if is_state and not training.optim.distributed and devices[item.role] > layout.model_size // layout.context:
        found.append(f"set {item.role}.optim.distributed=true: data-parallel ranks then share the optimizer's state")
    waits = phase is not Phase.start and not _works(item.role, phase)
    kinds = {"gradients": ("grads", offload.grads), "weights": ("params", offload.params)}
    kinds |= dict.fromkeys(("master weights", "optimizer state"), ("optimizer", offload.optimizer))
    if waits and item.what in kinds and not kinds[item.what][1] and (run.takes_turns or "critic" in devices):
        found.append(f"set {item.role}.offload.{kinds[item.what][0]}=true: it leaves the device in this phase")
    if item.what in ("weights", "gradients") or is_state:
        found += _sharding_levers(run, item.role)
        if training.lora is None:
            found.append(f"train adapters: {item.role}.lora={{rank: 16}} has next to no gradients and optimizer state")
    if item.what == "hand-over buckets":
        found.append("lower weight_sync.bucket_bytes")
    return found


def _works(role: str, phase: Phase) -> bool:
    """Whether a phase needs all of a model."""
    return phase in (Phase.save, Phase.update_actor if role == "actor" else Phase.update_critic)


def _sharding_levers(run: RunMemory, role: str) -> list[str]:
    layout = run.config.actor.parallelism if role == "actor" else run.config.critic.parallelism
    key = f"{role}.parallelism"
    return [
        f"raise {key}.tensor (now {layout.tensor}) within a node",
        f"raise {key}.pipeline (now {layout.pipeline})",
        "give the pool more devices, over which a distributed optimizer and experts spread",
    ]


def unit_of(size: int) -> Unit:
    """Return the largest unit of which there is at least one; KiB for less than one."""
    return next((unit for unit in UNITS if size >= unit.size), UNITS[-1])


def human(size: int) -> str:
    """Return a size in the largest unit of which there is at least one: `7.63 GiB`."""
    unit = unit_of(size)
    return "0" if size == 0 else f"{size / unit.size:.2f} {unit.name}"


def sums_by_what(items: Sequence[Item]) -> dict[str, int]:
    """Return the bytes of each `role what`."""
    found: dict[str, int] = defaultdict(int)
    for item in items:
        found[f"{item.role} {item.what}"] += item.bytes
    return dict(found)
