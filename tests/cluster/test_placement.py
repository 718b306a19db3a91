"""Pools and colocation on real Ray with fake GPUs, on one node and on two simulated nodes."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from megappo.cluster.placement import Placement, Slot
from megappo.config.cluster import ClusterConfig
from megappo.errors import WorkerError

GPUS = 2
"""Of each node."""
ROLES = {"actor": "main", "critic": "main", "rollout": "main"}


@ray.remote
class Probe:
    def where(self) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


def devices(slots: list[Slot]) -> list[tuple[str, str]]:
    """Node and device id of every slot, asked of a process that runs there (all processes stay alive)."""
    probes = [Probe.options(**slot.options()).remote() for slot in slots]
    found = [(node, ids[0]) for node, ids in ray.get([probe.where.remote() for probe in probes], timeout=60)]
    devices.keep.extend(probes)  # type: ignore[attr-defined]
    return found


devices.keep = []  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Number of nodes of a Ray cluster with fake GPUs."""
    ray.shutdown()  # that of other tests
    cluster = Cluster(initialize_head=True, head_node_args={"num_gpus": GPUS, "num_cpus": GPUS})
    for _ in range(request.param - 1):
        cluster.add_node(num_gpus=GPUS, num_cpus=GPUS)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield request.param
    devices.keep.clear()  # type: ignore[attr-defined]
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def free_devices() -> Iterator[None]:
    yield
    for probe in devices.keep:  # type: ignore[attr-defined]
        ray.kill(probe)
    devices.keep.clear()  # type: ignore[attr-defined]


def test_roles_of_one_pool_get_the_same_devices_and_neighbours_are_on_one_node(nodes: int) -> None:
    count = GPUS * nodes
    placement = Placement(ClusterConfig(pools={"main": count}), roles=ROLES, gpu=True)
    actor, critic = devices(placement.slots("actor", count)), devices(placement.slots("critic", count))
    rollout = devices(placement.slots("rollout", count))
    placement.remove()
    assert actor == critic == rollout
    assert len(set(actor)) == count
    hosts = [node for node, _ in actor]
    assert len(set(hosts)) == nodes
    assert all(len(set(hosts[start : start + GPUS])) == 1 for start in range(0, count, GPUS))


def test_separate_pools_get_disjoint_devices(nodes: int) -> None:
    count = GPUS * nodes // 2
    roles = {"actor": "train", "critic": "train", "rollout": "generate"}
    placement = Placement(ClusterConfig(pools={"train": count, "generate": count}), roles=roles, gpu=True)
    actor, critic = devices(placement.slots("actor", count)), devices(placement.slots("critic", count))
    rollout = devices(placement.slots("rollout", count))
    placement.remove()
    assert actor == critic
    assert not set(actor) & set(rollout)
    assert len(set(actor) | set(rollout)) == 2 * count


def test_too_few_devices_end_with_what_was_asked_and_what_there_is(nodes: int) -> None:
    wanted = GPUS * nodes + 1
    with pytest.raises(WorkerError, match=rf"pool main: {wanted} GPU.*the cluster has {GPUS * nodes} GPU"):
        Placement(ClusterConfig(pools={"main": wanted}, start_timeout_s=1.0), roles=ROLES, gpu=True)
