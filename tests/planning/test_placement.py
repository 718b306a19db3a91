"""Pools on nodes, ranks in them, and groups that cross nodes."""

from megappo.config.run import RunConfig
from megappo.planning.cluster import ClusterDescription
from megappo.planning.placement import Placement, place, pools_fit_cluster
from megappo.planning.training_memory import coordinates


def _cluster(nodes: int, devices: int) -> ClusterDescription:
    return ClusterDescription(nodes=nodes, devices_per_node=devices, device="h100")


def _split(training: int, engines: int) -> RunConfig:
    config = RunConfig()
    config.cluster.pools = {"training": training, "engines": engines}
    config.cluster.actor = config.cluster.critic = "training"
    config.cluster.rollout = config.cluster.reward = "engines"
    config.rollout.num_engines = engines
    return config


def _pools(placement: Placement) -> list[str | None]:
    return [device.pool for device in placement.devices]


def test_roles_of_one_pool_share_its_devices() -> None:
    config = RunConfig()
    config.algorithm.advantage.name = "grpo"
    config.cluster.pools = {"main": 3}
    config.rollout.num_engines = 2
    placement = place(config, _cluster(1, 4))
    assert [[seat.label for seat in device.seats] for device in placement.devices] == [
        ["actor 0 (dp0)", "rollout 0 (engine0)"],
        ["actor 1 (dp1)", "rollout 1 (engine1)"],
        ["actor 2 (dp2)"],
        [],
    ]
    assert {seat.share for device in placement.devices for seat in device.seats} == {0.5}
    assert _pools(placement) == ["main", "main", "main", None]


def test_a_pool_takes_a_node_that_holds_all_of_it() -> None:
    # engines (2) come first and take half of node 0; training (4) fits on node 1 whole.
    assert _pools(place(_split(4, 2), _cluster(2, 4))) == ["engines", "engines", None, None, *["training"] * 4]


def test_a_pool_larger_than_a_node_takes_those_with_the_most_room() -> None:
    placement = place(_split(6, 2), _cluster(2, 4))
    assert _pools(placement) == ["engines", "engines", "training", "training", *["training"] * 4]
    assert [device.node for device in placement.seats_of("actor")] == [0, 0, 1, 1, 1, 1]


def test_a_tensor_parallel_group_that_crosses_nodes_is_named() -> None:
    config = _split(6, 2)
    config.actor.parallelism.tensor = 3
    (warning,) = place(config, _cluster(2, 4)).warnings
    assert warning.startswith("actor.parallelism.tensor=3: 1 of 2 groups cross nodes (the first one nodes 0 and 1)")
    config.actor.parallelism.tensor = 2
    assert place(config, _cluster(2, 4)).warnings == []


def test_an_engine_that_crosses_nodes_cannot_work() -> None:
    config = _split(2, 4)
    config.rollout.num_engines, config.rollout.tensor = 1, 4
    (fault,) = place(config, _cluster(3, 2)).faults
    assert "rollout.tensor=4: 1 of 1 engines cross nodes (the first is engine 0)" in fault
    assert place(config, _cluster(2, 4)).faults == []


def test_pools_larger_than_the_cluster_are_refused() -> None:
    config = _split(6, 4)
    assert pools_fit_cluster(config, _cluster(2, 5)) == []
    (violation,) = pools_fit_cluster(config, _cluster(3, 3))
    assert str(violation).startswith("cluster.pools=10 devices (engines 4 + training 6) is more than the 9 devices")


def test_pools_beyond_all_clusters_are_refused_whatever_the_cluster_is() -> None:
    config = _split(10**9, 4)
    (violation,) = pools_fit_cluster(config, _cluster(10**9, 8))
    assert str(violation).startswith("cluster.pools=1000000004 devices (engines 4 + training 1000000000) is more than")


def test_what_asks_servers_that_run_already_is_placed_and_is_no_engine() -> None:
    config = _split(2, 4)
    config.rollout.num_engines, config.rollout.tensor = 1, 4
    config.rollout.urls = ["http://elsewhere:1"]
    placement = place(config, _cluster(3, 2))
    assert len(placement.seats_of("rollout")) == 4 and placement.faults == []


def test_ranks_are_numbered_tensor_context_data_pipeline_and_experts_over_all_of_a_stage() -> None:
    config = RunConfig()
    layout = config.actor.parallelism
    layout.tensor, layout.context, layout.pipeline, layout.expert, layout.expert_tensor = 2, 2, 2, 2, 2
    places = [coordinates(layout, rank, 16) for rank in range(16)]
    assert [place.tensor for place in places[:8]] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [place.context for place in places[:8]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.data for place in places[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.pipeline for place in places] == [0] * 8 + [1] * 8
    assert [place.expert for place in places[:8]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place.expert_data for place in places[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
