"""Which node this process is, and where all of them meet: from options, torchrun's environment or Slurm's.

Options come first, then what torchrun says, then Slurm. Environment variables are read here only: they are the
launchers' protocol.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megappo.launch.errors import LaunchError
from megappo.launch.hosts import expand_hosts

_SLURM_PORTS = (20000, 10000)
"""First port, and how many: below the ports that Linux gives to connections (32768 on)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """This node among the nodes."""

    rank: int
    num_nodes: int
    head: str
    """Name or address of node 0."""
    port: int
    """Where node 0 listens for the others before there is Ray."""
    source: str
    """Who says so, for messages."""
    hosts: tuple[str, ...] = ()
    """Names of all nodes by rank, where the launcher tells them."""
    store_is_kept: bool = False
    """The launcher listens at the port already and keeps the store; node 0 does not open one."""
    job: str = "0"
    """Sets this launch apart from others in a store that is kept."""

    def name_of(self, rank: int) -> str:
        """Return a node's name for messages: `node 1 (gpu7)`."""
        return f"node {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"node {rank}"


@dataclass(kw_only=True, slots=True, frozen=True)
class PlaceOptions:
    """What the command line says; None: nothing."""

    nodes: int | None = None
    node_rank: int | None = None
    head_address: str | None = None
    port: int | None = None


def find_place(options: PlaceOptions, environment: Mapping[str, str] = os.environ) -> Place:
    """Return this node's place.

    Raises:
        LaunchError: nobody says how many nodes there are, or what is said cannot be.
    """
    told = _by_torchrun(environment) or _by_slurm(environment)
    if told is None:
        return _checked(_by_options(options))
    # Of what a launcher says only the meeting place may be another one.
    if options.nodes not in (None, told.num_nodes) or options.node_rank not in (None, told.rank):
        raise LaunchError(
            f"--nodes and --node-rank disagree with {told.source}, which says node {told.rank} of {told.num_nodes} "
            "(leave them out)"
        )
    if options.head_address is not None or options.port is not None:
        told = replace(told, store_is_kept=False)
    return _checked(
        replace(told, head=options.head_address or told.head, port=told.port if options.port is None else options.port)
    )


def _by_options(options: PlaceOptions) -> Place:
    if options.nodes is None:
        raise LaunchError(
            "no nodes given: neither torchrun nor Slurm started this process, and --nodes is missing (on every node: "
            "megappo launch --nodes 2 --node-rank 0 --head-address HOST --port 29500 -- train ...; on one machine "
            "`megappo train` needs no launch)"
        )
    one = options.nodes == 1
    missing = [
        name
        for name, value in (
            ("--node-rank", options.node_rank),
            ("--head-address", options.head_address),
            ("--port", options.port),
        )
        if value is None and not one
    ]
    if missing:
        raise LaunchError(f"--nodes {options.nodes} needs {', '.join(missing)}, too (the same port on all nodes)")
    return Place(
        rank=options.node_rank or 0,
        num_nodes=options.nodes,
        head=options.head_address or "127.0.0.1",
        port=options.port or 0,
        source="--nodes",
    )


def _by_torchrun(environment: Mapping[str, str]) -> Place | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    per_node = _number(environment, "LOCAL_WORLD_SIZE")
    if per_node != 1:
        raise LaunchError(
            f"torchrun started {per_node} processes on this node: give it --nproc-per-node 1 (Ray starts the processes "
            "of a node; launch/torchrun.sh does it so)"
        )
    return Place(
        rank=_number(environment, "GROUP_RANK"),
        num_nodes=_number(environment, "WORLD_SIZE"),
        head=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        source="torchrun",
        store_is_kept=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=f"{environment['TORCHELASTIC_RUN_ID']}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _by_slurm(environment: Mapping[str, str]) -> Place | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    if "SLURM_STEP_NODELIST" not in environment:
        raise LaunchError(
            "inside a Slurm job, but not started by srun, which starts one process on every node (srun "
            "--ntasks-per-node=1 megappo launch -- train ..., or launch/slurm.sbatch)"
        )
    tasks, nodes = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_STEP_NUM_NODES")
    if tasks != nodes:
        raise LaunchError(f"srun started {tasks} tasks on {nodes} nodes: use --ntasks-per-node=1 (Ray starts the rest)")
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    return Place(
        rank=_number(environment, "SLURM_PROCID"),
        num_nodes=nodes,
        head=hosts[0],
        port=slurm_port(environment),
        source="Slurm",
        hosts=tuple(hosts),
        job=environment["SLURM_JOB_ID"],
    )


def slurm_port(environment: Mapping[str, str]) -> int:
    """Return the port where the processes of a Slurm job meet, another one for the next job."""
    first, count = _SLURM_PORTS
    return first + _number(environment, "SLURM_JOB_ID") % count


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError) as error:
        raise LaunchError(f"{name}={environment.get(name)} of the environment is no number") from error


def _checked(place: Place) -> Place:
    if place.num_nodes < 1 or not 0 <= place.rank < place.num_nodes:
        raise LaunchError(f"node {place.rank} of {place.num_nodes} nodes, as {place.source} says, cannot be")
    if not 0 <= place.port < 65536:
        raise LaunchError(f"port {place.port}, as {place.source} says, is none (1 to 65535)")
    return place
