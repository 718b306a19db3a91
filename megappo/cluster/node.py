"""The Ray of one node of a cluster that megappo starts itself: the command that starts it, and who has joined.

`python -m megappo.cluster.node ADDRESS NUM_NODES SECONDS` waits until a cluster has so many nodes, and prints the
addresses of those that are there whenever there are more. Exit code 0: all of them.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping

import ray

JOINED = "joined: "
"""Begins every line that tells who is there; Ray's libraries print lines of their own."""
_POLL_S = 0.5
_SERVICE_PORTS = (
    "metrics-export-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
)
"""Ports of Ray's own services on a node: the default of one, 52365, may be in use, and those that Ray is to find itself
its raylet waits for, 15 s each, which a busy machine may miss (node_manager.cc:3576)."""
_CLIENT_PORT = "ray-client-server-port"
"""On node 0, for clients that nobody has here; it cannot be left out, and its default, 10001, may be in use."""
_STARTED = "from ray.scripts.scripts import main; main()"


def ray_environment(key: str, *, interface: str | None) -> dict[str, str]:
    """Return the environment of a node's Ray, and of what connects to it.

    Args:
        key: of this cluster; Ray refuses everybody else.
        interface: network interface of this node towards the others; None: not known.
    """
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": key,
        # Workers without a GPU keep the devices that their process sees; Ray would hide them (as cluster.runtime).
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if interface is not None:
        # Otherwise gloo takes the address of the host's name, which on many machines is a loopback one.
        environment |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return environment


def start_command(
    *,
    head: str,
    port: int,
    own: str,
    is_head: bool,
    free_port: Callable[[], int],
    num_cpus: int,
    num_gpus: int,
    object_store_bytes: int,
) -> list[str]:
    """Return the command that is this node's part of a cluster for as long as it runs.

    Args:
        head, port: where node 0's Ray answers.
        own: address of this node.
        free_port: returns a port of this node that nobody has.
    """
    join = (
        ["--head", f"--port={port}", "--include-dashboard=false"]
        if is_head
        else [f"--address={cluster_address(head, port)}"]
    )
    services = (*_SERVICE_PORTS, *((_CLIENT_PORT,) if is_head else ()))
    sizes = {"cpus": num_cpus, "gpus": num_gpus}
    return [
        *(sys.executable, "-W", "ignore", "-c", _STARTED, "start", *join),
        f"--node-ip-address={own}",
        *(f"--num-{name}={count}" for name, count in sizes.items()),
        f"--object-store-memory={object_store_bytes}",
        *(f"--{name}={free_port()}" for name in services),
        # Any free port: the default range (10002 to 19999) may be in use, by another job of this machine for one.
        *("--min-worker-port=0", "--max-worker-port=0"),
        *("--disable-usage-stats", "--block"),
    ]


def cluster_address(head: str, port: int) -> str:
    """Return the address of a cluster as Ray writes it."""
    return f"[{head}]:{port}" if ":" in head else f"{head}:{port}"


def wait_command(address: str, num_nodes: int, timeout_s: float) -> list[str]:
    """Return the command that waits until all nodes have joined."""
    return [sys.executable, "-W", "ignore", "-m", "megappo.cluster.node", address, str(num_nodes), str(timeout_s)]


def await_nodes(address: str, num_nodes: int, timeout_s: float) -> int:
    """Wait for the nodes of a cluster, and print those that are there; returns the exit code."""
    deadline = time.monotonic() + timeout_s
    _connect(address, deadline)
    told = 0
    while True:
        nodes: list[Mapping[str, object]] = ray.nodes()
        alive = [str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]]
        if len(alive) > told:
            print(f"{JOINED}{', '.join(alive)}", flush=True)
            told = len(alive)
        if len(alive) >= num_nodes or time.monotonic() > deadline:
            return 0 if len(alive) >= num_nodes else 1
        time.sleep(_POLL_S)


def _connect(address: str, deadline: float) -> None:
    """Connect to a cluster that may be starting: it answers before its first node is known."""
    while True:
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            return
        except Exception:  # whatever a cluster may raise that is half there; Ray has no class of its own for it
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def main(arguments: list[str]) -> int:
    """Wait for the nodes that the arguments tell of; returns the exit code."""
    address, num_nodes, timeout_s = arguments
    return await_nodes(address, int(num_nodes), float(timeout_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
