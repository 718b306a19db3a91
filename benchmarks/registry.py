"""The programs by name, and the peers that some of them compare with.

To add one: a module `benchmarks.NAME` with the options `--quick` and `--output FILE`, that writes a JSON report with
"program", "environment" and "cases" (see `benchmarks.report`), and a line in PROGRAMS.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.environment import ROOT


@dataclass(kw_only=True, slots=True, frozen=True)
class Peer:
    """What a program compares with, installed in a folder of its own and never a dependency."""

    name: str
    folder: str
    """Below the repository."""
    module: str
    """What is imported of it."""
    place: str
    """Where that lies in the folder, as a pattern."""
    target: str
    """What `make` installs it by."""
    on_path: bool
    """Whether the program imports it itself; else it runs in the peer's own environment."""

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f"`make {self.target}` installs {self.name} into {self.folder}; `make bench` does that first."

    def is_installed(self) -> bool:
        """Whether it is in its folder, or can be imported anyway."""
        if any((ROOT / self.folder).glob(self.place)):
            return True
        return self.on_path and importlib.util.find_spec(self.module) is not None


VERL = Peer(
    name="verl 0.9.1", folder=".oracle", module="verl", place="verl/__init__.py", target="bench-verl", on_path=True
)
TRL = Peer(
    name="TRL 1.16.0",
    folder=".trl",
    module="trl",
    place="lib/python*/site-packages/trl/__init__.py",
    target="bench-trl",
    on_path=False,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """One benchmark."""

    name: str
    question: str
    peer: Peer | None = None
    arguments: Sequence[str] = ()
    """What it is started with when nothing else is asked of it."""

    @property
    def module(self) -> str:
        """What `python -m` runs."""
        return f"benchmarks.{self.name}"

    def environment(self) -> dict[str, str]:
        """Return the variables of its process: one thread, and its peer on the path."""
        paths = [str(ROOT / self.peer.folder)] if self.peer is not None and self.peer.on_path else []
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        found = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return found | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


PROGRAMS = {
    program.name: program
    for program in (
        Program(name="algorithms", question="advantages, KL and step metrics", peer=VERL),
        Program(name="balance", question="balancing over ranks, and micro-batch plans", peer=VERL),
        Program(name="log_probs", question="log-probs and entropy from hidden states: time and memory", peer=VERL),
        Program(name="train_mfu", question="training speed of a model in a layout"),
        Program(name="rollout", question="sampling speed of the engines, and their tail"),
        Program(name="weight_sync", question="a hand-over of weights: copies, bytes, memory"),
        Program(name="checkpoint", question="saving and loading, and how long training waits"),
        Program(name="data_plane", question="bytes on the controller, and the way of sequences through Ray", peer=VERL),
        Program(name="controller", question="the controller's share of a step of 32,768 sequences"),
        Program(name="end_to_end", question="GRPO steps of a tiny model against TRL", peer=TRL),
    )
}
