"""Pools and colocation on real Ray with fake GPUs, on one node and on two simulated nodes."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from megappo.cluster.placement import Placement, Slot
from megappo.config.cluster import ClusterConfig
from megappo.errors import WorkerError

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


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes with four fake GPUs each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_gpus": 4, "num_cpus": 8})
    cluster.add_node(num_gpus=4, num_cpus=8)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield
    devices.keep.clear()  # type: ignore[attr-defined]
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def free_devices() -> Iterator[None]:
    yield
    for probe in devices.keep:  # type: ignore[attr-defined]
        ray.kill(probe)
    devices.keep.clear()  # type: ignore[attr-defined]


def test_roles_of_one_pool_get_the_same_devices(two_nodes: None) -> None:
    placement = Placement(ClusterConfig(pools={"main": 2}), roles=ROLES, gpu=True)
    actor, critic = devices(placement.slots("actor", 2)), devices(placement.slots("critic", 2))
    rollout = devices(placement.slots("rollout", 2))
    placement.remove()
    assert actor == critic == rollout
    assert len(set(actor)) == 2


def test_separate_pools_get_disjoint_devices(two_nodes: None) -> None:
    roles = {"actor": "train", "critic": "train", "rollout": "generate"}
    placement = Placement(ClusterConfig(pools={"train": 2, "generate": 2}), roles=roles, gpu=True)
    actor, critic = devices(placement.slots("actor", 2)), devices(placement.slots("critic", 2))
    rollout = devices(placement.slots("rollout", 2))
    placement.remove()
    assert actor == critic
    assert not set(actor) & set(rollout)


def test_a_pool_over_two_nodes_keeps_neighbours_on_one_node(two_nodes: None) -> None:
    placement = Placement(ClusterConfig(pools={"main": 8}), roles=ROLES, gpu=True)
    actor, critic = devices(placement.slots("actor", 8)), devices(placement.slots("critic", 8))
    placement.remove()
    assert actor == critic
    assert len(set(actor)) == 8
    nodes = [node for node, _ in actor]
    assert nodes[:4] == [nodes[0]] * 4 and nodes[4:] == [nodes[4]] * 4 and nodes[0] != nodes[4]


def test_too_few_devices_end_with_what_was_asked_and_what_there_is(two_nodes: None) -> None:
    with pytest.raises(WorkerError, match=r"pool main: 9 GPU.*the cluster has 8 GPU"):
        Placement(ClusterConfig(pools={"main": 9}, start_timeout_s=3.0), roles=ROLES, gpu=True)
