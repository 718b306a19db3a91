"""A Ray cluster on this machine, for tests: nodes of one CPU at addresses of their own: that of the machine, for
the head, 127.0.0.2 and so on.

`python -m tests.launch.ray_nodes COUNT DASHBOARD_PORT` prints the address of the cluster, and then does what is asked
on its standard input, a word a line, and prints the address of the node: `add` starts one more, `remove` ends the
oldest that is not the head, as a power cut does. It ends with its input.
"""

import sys
from typing import Any

from ray._private.node import Node
from ray.cluster_utils import Cluster

from megappo.launch.hosts import free_port
from tests.launch.real_runs import own_address

SERVICE_PORTS = (
    "metrics_export_port",
    "metrics_agent_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)


class Nodes:
    """The nodes of one cluster, the head first."""

    def __init__(self, dashboard_port: int) -> None:
        self._cluster = Cluster()
        self._count = 0
        self._others: list[Node] = []
        self._start(include_dashboard=True, dashboard_host=own_address(), dashboard_port=dashboard_port)
        self.address = str(self._cluster.address)

    def add(self) -> str:
        self._others.append(self._start())
        return self._others[-1].node_ip_address

    def remove(self) -> str:
        node = self._others.pop(0)
        self._cluster.remove_node(node, allow_graceful=False)
        return node.node_ip_address

    def shut_down(self) -> None:
        self._cluster.shutdown()

    # Any: whatever ray.cluster_utils takes.
    def _start(self, **settings: Any) -> Node:
        self._count += 1
        own = own_address() if self._count == 1 else f"127.0.0.{self._count}"
        ports = {name: free_port(own) for name in SERVICE_PORTS}
        return self._cluster.add_node(node_ip_address=own, num_cpus=1, **ports, **settings)


def main(count: int, dashboard_port: int) -> None:
    nodes = Nodes(dashboard_port)
    try:
        for _ in range(count - 1):
            nodes.add()
        print("cluster", nodes.address, flush=True)
        for line in sys.stdin:
            print(line.strip(), {"add": nodes.add, "remove": nodes.remove}[line.strip()](), flush=True)
    finally:
        nodes.shut_down()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
