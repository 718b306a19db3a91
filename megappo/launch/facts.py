"""What the nodes of a run must have in common, and what each of them brings."""

import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megappo.config.store import config_folder
from megappo.observability.versions import package_versions

CLOCK_TOLERANCE_S = 10.0
"""Clocks further apart than this are told of."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NodeFacts:
    """One node, as it describes itself."""

    rank: int
    host: str
    address: str
    executable: str
    """Its Python."""
    versions: Mapping[str, str]
    """Python, packages that compute, and `source`: a fingerprint of megappo's files."""
    num_gpus: int
    num_cpus: int
    """That this process may use."""

    # Any: what JSON holds.
    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look_around(rank: int, address: str) -> NodeFacts:
    """Return the facts of this node."""
    return NodeFacts(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        executable=sys.executable,
        versions=package_versions() | {"source": source_fingerprint()},
        num_gpus=torch.cuda.device_count(),  # asks the driver; no context is made
        num_cpus=len(os.sched_getaffinity(0)),
    )


def source_fingerprint() -> str:
    """Return a fingerprint of megappo's modules and configuration files, by names and contents."""
    package = Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    for root, pattern in ((package, "**/*.py"), (config_folder(), "**/*.yaml")):
        for path in sorted(root.glob(pattern)):
            total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def describe(node: NodeFacts) -> str:
    """Return a node's name for messages: `node 1 (gpu7)`."""
    return f"node {node.rank} ({node.host})"


def version_table(nodes: Sequence[NodeFacts]) -> list[str]:
    """Return a table of what differs, a row for every kind of node; empty where nothing does."""
    names = sorted({name for node in nodes for name in node.versions})
    differing = [name for name in names if len({node.versions.get(name) for node in nodes}) > 1]
    if not differing:
        return []
    kinds: dict[tuple[str, ...], list[NodeFacts]] = {}
    for node in nodes:
        kinds.setdefault(tuple(node.versions.get(name, "none") for name in differing), []).append(node)
    rows = [("", *differing)]
    rows += [(_names(members), *versions) for versions, members in kinds.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(differing) + 1)]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
    pythons = {node.executable for node in nodes}
    return table if len(pythons) == 1 else [*table, *(f"{describe(node)} runs {node.executable}" for node in nodes)]


def _names(members: Sequence[NodeFacts]) -> str:
    """Return the names of some nodes, or how many they are and the first."""
    shown = ", ".join(describe(node) for node in members[:2])
    return shown if len(members) <= 2 else f"{shown} and {len(members) - 2} more"


def late_clocks(nodes: Sequence[NodeFacts], offsets_s: Mapping[int, float]) -> list[str]:
    """Return a line for every node whose clock is off from node 0's, given by how much (positive: ahead)."""
    return [
        f"the clock of {describe(node)} is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} that of node 0: "
        "times in logs do not compare"
        for node in nodes
        if abs(off := offsets_s.get(node.rank, 0.0)) > CLOCK_TOLERANCE_S
    ]
