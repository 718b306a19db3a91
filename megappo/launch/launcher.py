"""`megappo launch`, from its options to its exit code."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping

from megappo.cluster.node import start_command
from megappo.errors import INTERRUPTED
from megappo.launch.facts import look_around
from megappo.launch.head import Head
from megappo.launch.hosts import own_address, resolve
from megappo.launch.meeting import open_meeting
from megappo.launch.member import Follower
from megappo.launch.order import LaunchOrder
from megappo.launch.place import Place
from megappo.launch.signals import SignalCounts

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_TORCHRUN_PREFIXES = ("GROUP_", "MASTER_", "TORCHELASTIC_")
Say = Callable[[str], None]


def launch(order: LaunchOrder, place: Place) -> int:
    """Take this node's part in a launch; returns the exit code that all nodes end with.

    Raises:
        MegappoError: this node found nobody, or lost node 0.
    """
    say = _say_as(place)
    signals = SignalCounts()
    head = resolve(place.head)
    base = children_environment()
    facts = look_around(place.rank, own_address(head, is_head=place.rank == 0))
    try:
        limits = order.limits
        meeting = open_meeting(place, address=head, signals=signals, join_s=limits.join_s, silence_s=limits.silence_s)
        if place.rank == 0:
            return Head(order, meeting=meeting, facts=facts, signals=signals, base=base, say=say).run()
        code = Follower(order, meeting=meeting, facts=facts, signals=signals, base=base).run()
        say(f"node 0 ended the launch with exit code {code}")
        return code
    except KeyboardInterrupt:
        return INTERRUPTED


def describe_launch(order: LaunchOrder, place: Place) -> list[str]:
    """Return what a launch would do on this node, in lines for people. Looks at nothing but the configuration."""
    config = order.load_config()
    cpus = order.cpus_per_node or len(os.sched_getaffinity(0))
    ray = start_command(
        head=place.head,
        port=0,
        own="OWN_ADDRESS",
        is_head=place.rank == 0,
        free_port=lambda: 0,
        num_cpus=cpus,
        num_gpus=0,
        object_store_bytes=config.cluster.object_store_bytes,
    )
    words = " ".join(word for word in ray[ray.index("start") :] if "worker-port" not in word)
    ray_line = words.replace("port=0 ", "port=ANY_FREE ").replace(f"{place.head}:0", f"{place.head}:ITS_PORT")
    lines = [
        f"node {place.rank} of {place.num_nodes}, as {place.source} says; meeting at {place.head}:{place.port}",
        "compare on all nodes: Python, package versions, megappo's files, "
        f"the folder of runs {config.run.dir}, model folders",
        f"ray {ray_line.replace('--num-gpus=0', '--num-gpus=ALL')}",
    ]
    if place.rank == 0:
        command = shlex.join([order.command, *order.overrides])
        lines.append(f"megappo {command} cluster.address={place.head}:PORT")
    else:
        lines.append("wait for node 0, and end with its exit code")
    return lines


def children_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without what torchrun says of this process: it holds for none that is started here."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
    }


def _say_as(place: Place) -> Say:
    def say(text: str) -> None:
        print(f"launch, node {place.rank}: {text}", file=sys.stderr, flush=True)

    return say
