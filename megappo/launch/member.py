"""What a node does beside node 0, which runs the same up to its own part: `Node`."""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megappo.cluster.node import ray_environment, start_command
from megappo.errors import INTERRUPTED
from megappo.launch.children import Child
from megappo.launch.errors import NodeLostError
from megappo.launch.facts import NodeFacts
from megappo.launch.files import proof_of, read_secret, view_of
from megappo.launch.hosts import free_port, interface_of
from megappo.launch.meeting import Meeting
from megappo.launch.order import LaunchOrder
from megappo.launch.signals import SignalCounts

RAY_END_S = 15.0
"""What Ray has to end its processes."""


class Node:
    """Ray on this node, and its log; leaving it ends Ray."""

    def __init__(self, order: LaunchOrder, facts: NodeFacts) -> None:
        self._order, self._facts = order, facts
        self._folder = Path(tempfile.mkdtemp(prefix="megappo-launch-"))
        self.ray: Child | None = None
        self._tries_left = 2
        self.environment: dict[str, str] = {}

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        if self.ray is not None:
            self.ray.end(grace_s=RAY_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def log(self, name: str) -> Path:
        return self._folder / name

    def start_ray(self, key: str, *, base: Mapping[str, str], head: str, port: int, object_store_bytes: int) -> None:
        """Start Ray here: the head on node 0, and a node of it elsewhere."""
        own = self._facts.address
        self.environment = {**base, **ray_environment(key, interface=interface_of(own))}
        command = start_command(
            head=head,
            port=port,
            own=own,
            is_head=self._facts.rank == 0,
            free_port=partial(free_port, own),
            num_cpus=self._order.cpus_of(self._facts),
            num_gpus=self._facts.num_gpus,
            object_store_bytes=object_store_bytes,
        )
        self._command = command
        self.ray = self._ray()

    def end_of_ray(self, *, may_try_again: bool) -> str | None:
        """Return what became of Ray here where it has ended.

        While a cluster comes together it is tried again, twice: Ray's processes wait 30 s for each other, whatever they
        are told (ray/_private/node.py:428,1405), which a busy machine may miss.
        """
        if self.ray is None or (code := self.ray.poll()) is None:
            return None
        if may_try_again and self._tries_left:
            self._tries_left -= 1
            self.ray.end(grace_s=RAY_END_S)
            self.ray = self._ray()
            return None
        return f"Ray ended with exit code {code}{self.ray.last_lines()}"

    def _ray(self) -> Child:
        return Child(self._command, environment=self.environment, log=self.log("ray.log"), ignores_signals=True)


class Follower:
    """A node that is not node 0."""

    def __init__(
        self, order: LaunchOrder, *, meeting: Meeting, facts: NodeFacts, signals: SignalCounts, base: Mapping[str, str]
    ) -> None:
        self._order, self._meeting, self._facts, self._signals, self._base = order, meeting, facts, signals, base

    def run(self) -> int:
        """Take part in a launch; returns the exit code of its controller.

        Raises:
            NodeLostError: node 0 is gone.
        """
        meeting = self._meeting
        meeting.say("facts", self._facts.as_json() | {"cpus": self._order.cpus_of(self._facts)})
        with Node(self._order, self._facts) as node:
            try:
                code = self._follow(node)
            except KeyboardInterrupt:
                meeting.say("lost", "interrupted")
                code = INTERRUPTED
        with suppress(NodeLostError):  # node 0 waits for this, and not for ever
            meeting.say("ended", code)
        return code

    def _follow(self, node: Node) -> int:
        request = self._await("request")
        if request is None:
            return self._end_code()
        secret = read_secret(Path(request["secret"]))
        view = {"proof": proof_of(secret), "paths": {path: view_of(path) for path in request["paths"]}}
        self._meeting.say("view", view)
        head = self._await("head")
        if head is None or secret is None:
            return self._end_code()
        node.start_ray(
            secret,
            base=self._base,
            head=head["address"],
            port=head["port"],
            object_store_bytes=head["object_store_bytes"],
        )
        return self._stay(node)

    def _stay(self, node: Node) -> int:
        """Keep Ray going until the end of the launch."""
        told = False
        while (end := self._meeting.hear("end")) is None:
            before = self._meeting.hear("running") is None
            if not told and (reason := node.end_of_ray(may_try_again=before)) is not None:
                self._meeting.say("lost", reason)
                told = True
            self._tick(before_controller=before)
        return int(end)

    # Any: what JSON holds.
    def _await(self, subject: str) -> Any | None:
        """Return what node 0 says to all, None where it has ended instead."""
        while (said := self._meeting.hear(subject)) is None:
            if self._meeting.hear("end") is not None:
                return None
            self._tick(before_controller=True)
        return said

    def _tick(self, *, before_controller: bool) -> None:
        self._meeting.tick()
        if self._meeting.silent():
            raise NodeLostError(f"{self._meeting.name_of(0)} is gone: nothing heard from it")
        if before_controller and self._signals.asked_to_end:
            raise KeyboardInterrupt

    def _end_code(self) -> int:
        return int(self._meeting.hear("end") or 0)
