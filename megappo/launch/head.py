"""Node 0 of a launch: brings the nodes together, starts Ray and the controller, and ends all with its exit code."""

import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megappo.cluster.node import JOINED, cluster_address, wait_command
from megappo.config.run import RunConfig
from megappo.errors import INTERRUPTED, MegappoError
from megappo.launch import files
from megappo.launch.children import Child
from megappo.launch.errors import LaunchError, NodeLostError
from megappo.launch.facts import NodeFacts, describe, late_clocks, version_table
from megappo.launch.hosts import free_port
from megappo.launch.meeting import Meeting
from megappo.launch.member import Node
from megappo.launch.order import LaunchOrder, missing_devices
from megappo.launch.signals import SignalCounts, still_to_pass_on

_CONTROLLER_END_S = 30.0
"""What a controller has to end when the launch is given up."""
Say = Callable[[str], None]

# Any: what JSON holds.
Json = Any


class Head:
    """Node 0.

    Args:
        base: environment of what is started here.
        say: prints a line for people.
    """

    def __init__(
        self,
        order: LaunchOrder,
        *,
        meeting: Meeting,
        facts: NodeFacts,
        signals: SignalCounts,
        base: Mapping[str, str],
        say: Say,
    ) -> None:
        self._order, self._meeting, self._signals, self._base, self._say = order, meeting, signals, base, say
        self._nodes = [facts]
        self._cpus = [order.cpus_of(facts)]
        self._lost: set[int] = set()
        meeting.name_of = self._name_of

    def run(self) -> int:
        """Carry out the launch; returns the exit code of the controller, or of what was wrong, which is told."""
        try:
            with Node(self._order, self._nodes[0]) as node:
                return self._decide(node)
        finally:
            self._await_ends()

    def _decide(self, node: Node) -> int:
        """Return the exit code for all nodes, and tell them, while Ray still runs."""
        code = 1
        try:
            code = self._run(node)
        except KeyboardInterrupt:
            code = INTERRUPTED
            self._say("interrupted")
        except MegappoError as error:
            code = error.exit_code
            self._say(str(error))
        finally:
            with suppress(NodeLostError):
                self._meeting.say_to_all("end", code)
        return code

    def _run(self, node: Node) -> int:
        config = self._order.load_config()
        self._gather_nodes()
        key = self._agree_on_files(config)
        address = self._start_ray(node, key, config)
        return self._run_controller(node, address)

    def _gather_nodes(self) -> None:
        """Wait for all nodes, and refuse those that run something else."""
        others = self._from_others("facts", self._order.limits.join_s, "has not joined")
        for said in others:
            self._cpus.append(said.pop("cpus"))
            self._nodes.append(NodeFacts(**said))
        if table := version_table(self._nodes):
            text = "\n".join(f"  {line}" for line in table)
            raise LaunchError(f"the nodes do not run the same (install the same on all of them):\n{text}")
        gpus = ", ".join(f"{count} GPUs" for count in sorted({node.num_gpus for node in self._nodes}))
        self._say(f"{len(self._nodes)} nodes are here, {gpus} on each: {', '.join(map(describe, self._nodes[:8]))}")

    def _agree_on_files(self, config: RunConfig) -> str:
        """Check what the nodes see of the disks; returns the key of the cluster, which all of them have read."""
        if problem := missing_devices(self._order, config, self._nodes, self._cpus):
            raise LaunchError(problem)
        key, paths = secrets.token_hex(32), files.shared_paths(config)
        own = {"proof": files.proof_of(key), "paths": {path: files.view_of(path) for path in paths}}
        with files.secret_file(Path(config.run.dir), key) as secret:
            self._meeting.say_to_all("request", {"secret": str(secret), "paths": paths})
            views = [own, *self._from_others("view", self._order.limits.files_s, "has not looked at the files")]
        for line in late_clocks(self._nodes, self._meeting.clocks_ahead_s):
            self._say(line)
        if problem := files.disagreements(self._nodes, views, run_dir=config.run.dir, proof=own["proof"]):
            raise LaunchError(problem)
        return key

    def _start_ray(self, node: Node, key: str, config: RunConfig) -> str:
        """Start Ray on all nodes; returns its address."""
        own, limit = self._nodes[0].address, self._order.limits.ray_s
        port, size = free_port(own), config.cluster.object_store_bytes
        node.start_ray(key, base=self._base, head=own, port=port, object_store_bytes=size)
        deadline = time.monotonic() + limit
        while not _listens(own, port):
            self._watch(node)
            if time.monotonic() > deadline:
                raise LaunchError(f"Ray did not start on node 0 within {limit:.0f} s")
        address = cluster_address(own, port)
        waits = Child(
            wait_command(address, len(self._nodes), max(1.0, deadline - time.monotonic())),
            environment=node.environment,
            log=node.log("wait.log"),
            ignores_signals=True,
        )
        told = False
        try:
            while (code := waits.poll()) is None:
                # Ray answers before its own node is known, and whoever joins in between fails.
                if not told and waits.has_printed(JOINED):
                    self._meeting.say_to_all("head", {"address": own, "port": port, "object_store_bytes": size})
                    told = True
                self._watch(node)
        finally:
            waits.end(grace_s=1.0)
        if code != 0:
            raise LaunchError(
                f"not all nodes have joined Ray within {limit:.0f} s; those that have:{waits.last_lines()}"
            )
        self._say(f"Ray is up on {len(self._nodes)} nodes at {address}")
        return address

    def _run_controller(self, node: Node, address: str) -> int:
        """Run the command until it ends; signals of all nodes reach it, and it decides what the loss of one means."""
        command = [sys.executable, "-m", "megappo", self._order.command, *self._order.overrides]
        self._meeting.say_to_all("running", True)
        controller = Child([*command, f"cluster.address={address}"], environment=node.environment)
        passed: Counter[str] = Counter()
        try:
            while (code := controller.poll()) is None:
                self._meeting.tick()
                for lost, reason in self._newly_lost():
                    self._say(f"{lost} is gone: {reason}")
                for number in still_to_pass_on(self._meeting.signal_counts(), passed):
                    passed[number.name] += 1
                    controller.send(number)
        finally:
            controller.end(grace_s=_CONTROLLER_END_S)
        return code

    def _from_others(self, subject: str, limit_s: float, what: str) -> list[Json]:
        """Return what every other node says, by rank. Raises LaunchError for those that say nothing in time."""
        heard: dict[int, Json] = {}
        deadline = time.monotonic() + limit_s
        expected = range(1, self._meeting.place.num_nodes)
        while len(heard) < len(expected):
            for rank in expected:
                if rank not in heard and (said := self._meeting.hear(f"{subject}/{rank}")) is not None:
                    heard[rank] = said
            self._watch(None)
            if time.monotonic() > deadline and len(heard) < len(expected):
                late = ", ".join(self._name_of(rank) for rank in expected if rank not in heard)
                verb = what if len(heard) == len(expected) - 1 else what.replace("has", "have", 1)
                raise LaunchError(
                    f"{late} {verb} within {limit_s:.0f} s (is it started there, with the same number of nodes, head "
                    "address and port; may it connect to node 0? its own output says more)"
                )
        return [heard[rank] for rank in expected]

    def _watch(self, node: Node | None) -> None:
        """Wait a moment, and give up where a node is lost before the controller runs."""
        self._meeting.tick()
        if self._signals.asked_to_end:
            raise KeyboardInterrupt
        if node is not None and (reason := node.end_of_ray(may_try_again=True)) is not None:
            raise LaunchError(f"node 0: {reason}")
        for lost, reason in self._newly_lost():
            raise NodeLostError(f"{lost} joined and is gone: {reason}")

    def _newly_lost(self) -> list[tuple[str, str]]:
        """Return the nodes that were lost since the last call, and why."""
        found: dict[int, str] = {}
        for rank in self._meeting.silent():
            limit = f"{self._meeting.silence_s:.0f} s"
            found[rank] = f"nothing heard from it for {limit} (its own output, or the machine's, says why)"
        for rank in range(1, self._meeting.place.num_nodes):
            if (reason := self._meeting.hear(f"lost/{rank}")) is not None:
                found[rank] = reason
        new = {rank: reason for rank, reason in found.items() if rank not in self._lost}
        self._lost |= set(new)
        return [(self._name_of(rank), reason) for rank, reason in sorted(new.items())]

    def _await_ends(self) -> None:
        """Keep the store until the others have read that this is the end; they may still be starting."""
        waiting = set(range(1, self._meeting.place.num_nodes))
        deadline = time.monotonic() + self._order.limits.end_s
        with suppress(NodeLostError):  # of the store itself, which a launcher keeps
            while waiting and time.monotonic() < deadline:
                waiting -= {rank for rank in waiting if self._meeting.hear(f"ended/{rank}") is not None}
                waiting -= set(self._meeting.silent())
                self._meeting.tick()

    def _name_of(self, rank: int) -> str:
        known = {node.rank: describe(node) for node in self._nodes}
        return known.get(rank) or self._meeting.place.name_of(rank)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
        return True
    except OSError:
        return False
