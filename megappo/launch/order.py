"""What is to be launched."""

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config.cluster import DeviceKind
from megappo.config.layout_rules import roles
from megappo.config.run import RunConfig
from megappo.config.store import load_run_config
from megappo.errors import ConfigError, Violation
from megappo.launch.errors import LaunchError
from megappo.launch.facts import NodeFacts

COMMANDS = ("train", "sft", "rm")
"""What starts Ray workers; everything else runs without, alone or under torchrun."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """How long nodes wait for each other."""

    join_s: float
    """Until all nodes are there, from the start of node 0."""
    ray_s: float
    """Until Ray runs on all of them."""
    files_s: float = 120.0
    """Until all have looked at the files."""
    silence_s: float = 30.0
    """Until a node that says nothing counts as gone: many times the second in which it says something, for machines
    that are busy."""
    end_s: float = 30.0
    """Until all have ended, after the controller."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LaunchOrder:
    """A command of megappo on several nodes."""

    command: str
    overrides: tuple[str, ...]
    limits: Limits
    cpus_per_node: int | None = None
    """That Ray may hand out on this node; None: those that the process may use."""

    @classmethod
    def of(cls, words: Sequence[str], *, limits: Limits, cpus_per_node: int | None) -> "LaunchOrder":
        """Raises LaunchError where it is no command that can be launched."""
        command, *overrides = words or ("",)
        if command not in COMMANDS:
            raise LaunchError(
                f"`{command or 'nothing'}` cannot be launched, only {', '.join(COMMANDS)} (megappo launch ... -- train "
                "experiment=quickstart; benchmarks and conversion need no Ray: give them to torchrun itself)"
            )
        return cls(command=command, overrides=tuple(overrides), limits=limits, cpus_per_node=cpus_per_node)

    def load_config(self) -> RunConfig:
        """Return the configuration of the run.

        Raises:
            ConfigError: it breaks a rule, or names a cluster of its own.
        """
        config = load_run_config(self.overrides)
        if config.cluster.address is not None:
            rule, remedy = "is set by the launch, which starts Ray", "leave it out, or leave out the launch"
            raise ConfigError(
                [Violation(key="cluster.address", value=config.cluster.address, rule=rule, remedy=remedy)]
            )
        return config

    def cpus_of(self, node: NodeFacts) -> int:
        """Return how many CPUs Ray hands out on a node."""
        return self.cpus_per_node or node.num_cpus


def missing_devices(order: LaunchOrder, config: RunConfig, nodes: Sequence[NodeFacts], cpus: Sequence[int]) -> str:
    """Return what is wrong where the pools ask for more devices than the nodes have; empty: nothing.

    Args:
        cpus: that Ray hands out, by node.
    """
    cluster = config.cluster
    used = {"sft": {cluster.actor}, "rm": {cluster.reward}}.get(order.command)
    pools = used if used is not None else {getattr(cluster, role) for role in roles(config)}
    wanted = sum(cluster.pools[pool] for pool in pools)
    on_gpus = cluster.device is DeviceKind.cuda or (cluster.device is DeviceKind.auto and nodes[0].num_gpus > 0)
    have = [node.num_gpus for node in nodes] if on_gpus else list(cpus)
    if sum(have) >= wanted:
        return ""
    kind = "GPUs" if on_gpus else "CPUs"
    remedy = "add nodes, or make cluster.pools smaller"
    if not on_gpus:
        remedy += "; --cpus-per-node lets Ray hand out more than a node has"
    listed = " + ".join(map(str, have))
    return f"cluster.pools asks for {wanted} {kind}, and the nodes have {listed} = {sum(have)} ({remedy})"
