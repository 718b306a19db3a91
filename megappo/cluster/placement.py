"""Device pools as Ray placement groups, and the share of a device that each role takes.

A pool of n devices is a placement group of n bundles with one device each (a GPU; on CPU one logical CPU). Roles of
one pool are colocated: each takes 1 / (number of roles in the pool) of every bundle that it uses, so Ray hands all
of them the same device. Roles of different pools never share one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megappo.config.cluster import ClusterConfig
from megappo.errors import WorkerError


@dataclass(kw_only=True, slots=True, frozen=True)
class Slot:
    """A role's share of one device."""

    group: PlacementGroup
    bundle: int
    share: float
    """Fraction of the device, in (0, 1]."""
    gpu: bool

    def options(self) -> dict[str, Any]:
        """Return the Ray options that put a process here."""
        return {
            "num_gpus": self.share if self.gpu else 0,
            "num_cpus": self.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }


class Placement:
    """The pools of a run and the slots of its roles."""

    def __init__(self, cluster: ClusterConfig, *, roles: dict[str, str], gpu: bool) -> None:
        """Reserve the pools that `roles` (role name -> pool name) use.

        Raises:
            WorkerError: Ray cannot reserve them in time; says what each pool asks for and what there is.
        """
        self._gpu = gpu
        self._roles = roles
        self._groups: dict[str, PlacementGroup] = {}
        self._bundles: dict[str, list[int]] = {}
        device = {"GPU": 1.0, "CPU": 1.0} if gpu else {"CPU": 1.0}
        pools = sorted(set(roles.values()))
        for pool in pools:
            self._groups[pool] = placement_group([device] * cluster.pools[pool], strategy="PACK", name=f"pool-{pool}")
        ready = [group.ready() for group in self._groups.values()]
        done, _ = ray.wait(ready, num_returns=len(ready), timeout=cluster.start_timeout_s)
        if len(done) < len(ready):
            wanted = ", ".join(f"pool {pool}: {cluster.pools[pool]} {'GPU' if gpu else 'CPU'}" for pool in pools)
            self.remove()
            raise WorkerError(
                f"devices not available within {cluster.start_timeout_s:.0f} s: asked {wanted}; the cluster has "
                f"{_describe(ray.cluster_resources())}, free now {_describe(ray.available_resources())} "
                "(make cluster.pools smaller, add nodes, or end the run that holds them)"
            )
        for pool, group in self._groups.items():
            self._bundles[pool] = _bundles_by_node(group)

    def slots(self, role: str, count: int) -> list[Slot]:
        """Return the role's share of the first `count` devices of its pool; neighbours are on one node."""
        pool = self._roles[role]
        sharing = sum(1 for other in self._roles.values() if other == pool)
        share = int(1000 / sharing) / 1000  # Ray keeps four decimals: round down so that the shares fit
        return [
            Slot(group=self._groups[pool], bundle=bundle, share=share, gpu=self._gpu)
            for bundle in self._bundles[pool][:count]
        ]

    def remove(self) -> None:
        """Give the devices back."""
        for group in self._groups.values():
            remove_placement_group(group)


def _bundles_by_node(group: PlacementGroup) -> list[int]:
    """Return bundle indices so that the bundles of one node follow each other."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first_bundle_of_node: dict[str, int] = {}
    for bundle in sorted(nodes):
        first_bundle_of_node.setdefault(nodes[bundle], bundle)
    return sorted(nodes, key=lambda bundle: (first_bundle_of_node[nodes[bundle]], bundle))


def _describe(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("GPU", "CPU"))
