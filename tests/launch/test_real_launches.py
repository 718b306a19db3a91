"""Launches for real, on one machine: torchrun with two nodes, and two network namespaces as hosts.

Each is a run of two workers and an engine of which every node holds one device, so nothing works unless both do.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megappo.launch.hosts import free_port
from tests.launch.real_runs import (
    LAUNCH,
    TIMEOUT_S,
    TRAIN,
    WAITS,
    Nodes,
    assert_gone,
    assert_no_key_in_command_lines,
    kill_tree,
    own_address,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def start_by_torchrun(nodes: Nodes, *overrides: str) -> None:
    address = own_address()
    port = str(free_port(address))
    place = ("--nodes", "2", "--head-address", address, "--port", port, "--env", "cpu")
    for rank in ("0", "1"):
        nodes.start([str(LAUNCH / "torchrun.sh"), *place, "--node-rank", rank, *WAITS, *TRAIN, *overrides])


def test_torchrun_makes_one_run_of_two_nodes(nodes: Nodes) -> None:
    start_by_torchrun(nodes, "run.name=torchrun", "trainer.total_steps=2")
    nodes.wait_for("step 1/2")
    processes = nodes.descendants()
    assert_no_key_in_command_lines(processes)
    assert nodes.wait() == [0, 0], nodes.output()
    assert "2 nodes are here" in nodes.output() and "Ray is up on 2 nodes" in nodes.output()
    assert_gone(processes)


def test_a_signal_to_both_nodes_lets_the_run_save_and_ends_both_with_85(nodes: Nodes) -> None:
    start_by_torchrun(nodes, "run.name=signalled", "trainer.total_steps=500")
    nodes.wait_for("step 1/500")
    processes = nodes.descendants()
    for process in nodes.processes:
        process.send_signal(signal.SIGUSR1)
    assert nodes.wait() == [85, 85], nodes.output()
    assert "ended early (SIGUSR1)" in nodes.output()
    assert_gone(processes)


def test_torchrun_runs_a_benchmark_on_two_nodes_without_ray(nodes: Nodes) -> None:
    address = own_address()
    place = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        address,
        "--master-port",
        str(free_port(address)),
    )
    benchmark = ("-m", "benchmarks.train_mfu", "--model", "tiny", "--quick", "--output", "torchrun_mfu.json")
    for rank in ("0", "1"):
        nodes.start([sys.executable, "-m", "torch.distributed.run", *place, "--node-rank", rank, *benchmark])
    assert nodes.wait() == [0, 0], nodes.output()
    case = json.loads((nodes.folder / "torchrun_mfu.json").read_text())["cases"]["as given"]
    assert case["figures"]["devices"] == 2


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable: hosts with addresses of their own, 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (apt-get install -y iproute2)")
    names = (f"launch-{os.getpid()}-a", f"launch-{os.getpid()}-b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable-a", "netns", names[0], "type", "veth", "peer", "name", "cable-b", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"cable-{'ab'[number - 1]}")
            for device in ("lo", f"cable-{'ab'[number - 1]}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])


def start_on_hosts(nodes: Nodes, hosts: tuple[str, str], *overrides: str) -> None:
    place = ("--nodes", "2", "--head-address", "10.77.0.1", "--port", "29500")
    for rank, host in enumerate(hosts):
        launch = [sys.executable, "-m", "megappo", "launch", *place, "--node-rank", str(rank), *WAITS]
        nodes.start(["ip", "netns", "exec", host, *launch, "--", *TRAIN, *overrides])


def test_two_hosts_with_addresses_of_their_own_make_one_run(nodes: Nodes, hosts: tuple[str, str]) -> None:
    start_on_hosts(nodes, hosts, "run.name=hosts", "trainer.total_steps=2")
    nodes.wait_for("step 1/2")
    processes = nodes.descendants()
    assert_no_key_in_command_lines(processes)
    assert nodes.wait() == [0, 0], nodes.output()
    assert "Ray is up on 2 nodes at 10.77.0.1:" in nodes.output()
    assert_gone(processes)


def test_a_host_that_is_lost_ends_the_run_with_its_name(nodes: Nodes, hosts: tuple[str, str]) -> None:
    start_on_hosts(nodes, hosts, "run.name=lost", "trainer.total_steps=500")
    nodes.wait_for("step 1/500")
    processes = nodes.descendants()
    kill_tree(nodes.processes[1].pid)
    assert nodes.wait() == [1, -signal.SIGKILL], nodes.output()
    assert "10.77.0.2) failed in " in nodes.output() and "its process died" in nodes.output()
    assert_gone(processes)
