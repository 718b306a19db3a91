"""Descriptions of clusters."""

import pytest

from megappo.errors import ConfigError
from megappo.planning.cluster import DEVICES, GIB, ClusterDescription, description_violations, read_description


def test_memory_is_that_of_the_device_unless_it_is_given() -> None:
    cluster = read_description({"nodes": 2, "devices_per_node": 8, "device": "h100"}, source="cluster.yaml")
    assert cluster.memory_bytes == 79 * GIB and cluster.num_devices == 16 and cluster.is_cuda
    given = ClusterDescription(nodes=1, devices_per_node=1, device="cuda", device_memory_gib=24)
    assert given.memory_bytes == 24 * GIB
    assert all(
        (ClusterDescription(nodes=1, devices_per_node=1, device=name).memory_bytes is None) == (name in ("cpu", "cuda"))
        for name in DEVICES
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "nodes=0 must be a whole number, 1 or more"),
        ({"nodes": True}, "nodes=True must be a whole number"),
        ({"devices_per_node": 1.5}, "devices_per_node=1.5 must be a whole number"),
        ({"device": "tpu"}, "device=tpu is not a known device (use one of cpu"),
        ({"device": None}, "device=??? must be given"),
        ({"device": ["h100"]}, "device=['h100'] is not a known device (use one of cpu"),
        ({"nodes": 10**9}, "nodes=1000000000 with devices_per_node=8 is more than 1000000 devices"),
        ({"device_memory_gib": float("inf")}, "device_memory_gib=inf must be a number above 0 and at most 1048576"),
        ({"device_memory_gib": 1e306}, "device_memory_gib=1e+306 must be a number above 0 and at most 1048576"),
        ({"device_memory_gib": 0}, "device_memory_gib=0 must be a number above 0"),
        ({"device_memory_gib": "80"}, "device_memory_gib=80 must be a number above 0"),
        ({"gpus": 8}, "gpus=8 is not a key of a cluster (use nodes, devices_per_node, device, device_memory_gib)"),
    ],
)
def test_a_wrong_description_names_key_value_rule_and_remedy(given: dict[str, object], message: str) -> None:
    whole = {"nodes": 1, "devices_per_node": 8, "device": "h100"} | given
    (violation,) = description_violations(whole, source="my.yaml")
    assert str(violation).startswith(f"my.yaml: {message}")


def test_all_faults_are_raised_together_under_the_names_of_options() -> None:
    with pytest.raises(ConfigError) as caught:
        read_description({"nodes": 0, "device": "x", "device_memory_gib": -1, "devices_per_node": 1}, source="--")
    assert [violation.key for violation in caught.value.violations] == ["--nodes", "--device", "--device-memory"]
