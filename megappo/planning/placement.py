"""Which rank of which role is on which device of which node, as the pools of a run are placed.

Ray packs a pool on as few nodes as it can (strategy PACK), and its devices follow each other node by node; where
several nodes would do, Ray chooses, and here the first is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megappo.config.layout_rules import roles, trained_models
from megappo.config.parallelism import ParallelismConfig
from megappo.config.reward_rules import REWARD_MODEL, asks_reward_model, model_rewards
from megappo.config.run import RunConfig
from megappo.errors import Violation
from megappo.planning.cluster import MOST_DEVICES, ClusterDescription
from megappo.planning.training_memory import coordinates


@dataclass(kw_only=True, slots=True, frozen=True)
class Seat:
    """A rank of a role on a device."""

    role: str
    rank: int
    coordinates: dict[str, int]
    """Of its mesh: tp, cp, dp, pp, ep of a trained model, engine and tp of an engine; only axes longer than 1."""
    share: float
    """Of the device, that Ray is asked for."""

    @property
    def label(self) -> str:
        """Return for example `actor 3 (tp1 dp1)`."""
        place = " ".join(f"{axis}{index}" for axis, index in self.coordinates.items())
        return f"{self.role} {self.rank}" + (f" ({place})" if place else "")


@dataclass(kw_only=True, slots=True)
class Device:
    """One device."""

    node: int
    index: int
    """On its node."""
    pool: str | None = None
    seats: list[Seat] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleRanks:
    """The ranks of one role."""

    role: str
    pool: str
    ranks: int
    parallelism: ParallelismConfig | None = None
    """Of a model that Megatron holds."""
    engine_width: int = 0
    """Ranks of one engine; 0: it is no engine."""


@dataclass(kw_only=True, slots=True)
class Placement:
    """Where everything is."""

    devices: list[Device]
    roles: list[RoleRanks]
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What cannot work."""

    def seats_of(self, role: str) -> list[Device]:
        """Return the devices of a role, by rank."""
        found = [(seat.rank, device) for device in self.devices for seat in device.seats if seat.role == role]
        return [device for _, device in sorted(found, key=lambda pair: pair[0])]


def roles_of_run(config: RunConfig) -> list[RoleRanks]:
    """Return the roles that take devices."""
    cluster, found = config.cluster, list[RoleRanks]()
    for role, layout, pool in trained_models(config):
        found.append(RoleRanks(role=role, pool=pool, ranks=cluster.pools[pool], parallelism=layout))
    width = config.rollout.tensor
    found.append(
        RoleRanks(
            role="rollout",
            pool=cluster.rollout,
            ranks=config.rollout.num_engines * width,
            # Of servers that run elsewhere only what asks them is here.
            engine_width=0 if config.rollout.urls else width,
        )
    )
    if model_rewards(config):
        found.append(RoleRanks(role="reward", pool=cluster.reward, ranks=config.reward.workers))
    if asks_reward_model(config):
        layout = config.reward_model.parallelism
        ranks = cluster.pools[cluster.reward]
        found.append(RoleRanks(role=REWARD_MODEL, pool=cluster.reward, ranks=ranks, parallelism=layout))
    return found


def pools_fit_cluster(config: RunConfig, cluster: ClusterDescription) -> list[Violation]:
    """All pools that the run uses have devices of their own in the cluster."""
    used = sorted({getattr(config.cluster, role) for role in roles(config)} & set(config.cluster.pools))
    sizes = {pool: config.cluster.pools[pool] for pool in used}
    total = sum(sizes.values())
    if total > MOST_DEVICES:
        rule, remedy = f"is more than {MOST_DEVICES} devices, the most that are reckoned", "make pools smaller"
    elif total > cluster.num_devices:
        rule = f"is more than the {cluster.num_devices} devices of the cluster ({cluster.nodes} nodes of "
        rule += f"{cluster.devices_per_node})"
        remedy = "make pools smaller, or describe a larger cluster (--nodes, --devices-per-node)"
    else:
        return []
    wanted = " + ".join(f"{pool} {size}" for pool, size in sizes.items())
    return [Violation(key="cluster.pools", value=f"{total} devices ({wanted})", rule=rule, remedy=remedy)]


def place(config: RunConfig, cluster: ClusterDescription) -> Placement:
    """Place the roles of a run. Its pools must fit into the cluster."""
    devices = [
        Device(node=node, index=index) for node in range(cluster.nodes) for index in range(cluster.devices_per_node)
    ]
    ranks = roles_of_run(config)
    placement = Placement(devices=devices, roles=ranks)
    for pool in sorted({role.pool for role in ranks}):
        held = _reserve(devices, config.cluster.pools[pool], pool)
        sharing = [role for role in ranks if role.pool == pool]
        share = int(1000 / len(sharing)) / 1000
        for role in sharing:
            for rank, device in enumerate(held[: role.ranks]):
                device.seats.append(Seat(role=role.role, rank=rank, coordinates=_axes(role, rank), share=share))
    for role in ranks:
        placement.warnings += _crossings(role, placement.seats_of(role.role))
    placement.faults += _split_engines(placement, cluster)
    return placement


def _reserve(devices: list[Device], count: int, pool: str) -> list[Device]:
    """Take free devices: of the first node that has enough, else of the nodes with the most free ones."""
    free: dict[int, list[Device]] = {}
    for device in devices:
        if device.pool is None:
            free.setdefault(device.node, []).append(device)
    whole = [held for held in free.values() if len(held) >= count]
    order = whole[:1] or sorted(free.values(), key=lambda held: (-len(held), held[0].node))
    taken = [device for held in order for device in held][:count]
    for device in taken:
        device.pool = pool
    return sorted(taken, key=lambda device: (device.node, device.index))


def _axes(role: RoleRanks, rank: int) -> dict[str, int]:
    """Return the coordinates of a rank on the axes that are longer than 1."""
    if role.engine_width:
        axes = {"engine": (rank // role.engine_width, 2), "tp": (rank % role.engine_width, role.engine_width)}
    elif role.parallelism is not None:
        layout = role.parallelism
        at = coordinates(layout, rank, role.ranks)
        axes = {
            "tp": (at.tensor, layout.tensor),
            "cp": (at.context, layout.context),
            "dp": (at.data, role.ranks // layout.model_size),
            "pp": (at.pipeline, layout.pipeline),
            "ep": (at.expert, layout.expert),
        }
    else:
        axes = {}
    return {axis: index for axis, (index, size) in axes.items() if size > 1}


def _groups(role: RoleRanks) -> Iterator[tuple[str, int]]:
    """Yield (axis, consecutive ranks of a group) whose ranks exchange much within each layer."""
    if role.parallelism is not None:
        yield "tensor", role.parallelism.tensor
        yield "expert_tensor", role.parallelism.expert_tensor


def _crossings(role: RoleRanks, devices: list[Device]) -> list[str]:
    """Return a line for each kind of group that spreads over nodes."""
    found: list[str] = []
    for axis, size in _groups(role):
        groups = [devices[start : start + size] for start in range(0, len(devices), size)]
        crossing = [group for group in groups if len({device.node for device in group}) > 1]
        if crossing:
            nodes = sorted({device.node for device in crossing[0]})
            found.append(
                f"{role.role}.parallelism.{axis}={size}: {len(crossing)} of {len(groups)} groups cross nodes (the "
                f"first one nodes {nodes[0]} and {nodes[-1]}): they exchange activations in every layer, over the "
                "network instead of NVLink (use a size that divides the devices of a node)"
            )
    return found


def _split_engines(placement: Placement, cluster: ClusterDescription) -> list[str]:
    """Return a line where an engine is on several nodes: it is one server, which sees the devices of its node."""
    faults: list[str] = []
    for role in placement.roles:
        devices, width = placement.seats_of(role.role), role.engine_width
        engines = [devices[start : start + width] for start in range(0, len(devices), width)] if width else []
        split = [index for index, held in enumerate(engines) if len({device.node for device in held}) > 1]
        if split:
            faults.append(
                f"rollout.tensor={width}: {len(split)} of {len(engines)} engines cross nodes (the first is engine "
                f"{split[0]}), and an engine is one server on one node of {cluster.devices_per_node} devices (use a "
                "size that divides them, or give engines a pool whose size fits nodes)"
            )
    return faults
