"""Whether all nodes see the same files: the folder of runs is shared, model folders hold the same.

The folder of runs must be one file system: workers write their logs, and ranks their parts of a checkpoint, where they
run. So node 0 puts a secret there, for its user's eyes only, and every node proves that it read it; the same secret is
the key of the run's Ray cluster, which thus crosses no network in the open and appears in no command line. Models may
be copies, so names and sizes are compared, not times. Data files are read on node 0 only.
"""

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megappo.config.reward_rules import model_rewards
from megappo.config.run import RunConfig
from megappo.launch.errors import LaunchError
from megappo.launch.facts import NodeFacts, describe

_MISSING = "missing"


def shared_paths(config: RunConfig) -> list[str]:
    """Return the model folders that the processes of a run open on their own nodes."""
    rewards = [term.model_path for term in model_rewards(config).values()]
    paths = [config.model.path, config.critic.path, config.reward_model.path, *rewards]
    return sorted({path for path in paths if path})


@contextmanager
def secret_file(folder: Path, token: str) -> Iterator[Path]:
    """Put a secret into a folder, readable for its owner only, while the others read it.

    Raises:
        LaunchError: the folder cannot be written.
    """
    # A new name: what a file server remembers of names that were not there cannot be in the way.
    path = folder / f".launch-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise LaunchError(f"run.dir={folder} cannot be written on node 0: {error} (choose another run.dir)") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def read_secret(path: Path) -> str | None:
    """Return the secret, None where this node does not see it."""
    try:
        return path.read_text()
    except OSError:
        return None


def proof_of(token: str | None) -> str:
    """Return what shows that a node has read the secret, and does not tell it."""
    return _MISSING if token is None else hashlib.sha256(token.encode()).hexdigest()


def view_of(path: str) -> str:
    """Return what this node sees at a path, in words that are the same where the files are."""
    place = Path(path)
    try:
        if place.is_file():
            return f"file of {place.stat().st_size:,} bytes"
        entries = sorted((entry.name, entry.stat().st_size) for entry in place.iterdir() if entry.is_file())
    except OSError:
        return _MISSING
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()[:8]
    return f"{len(entries)} files, {sum(size for _, size in entries):,} bytes ({digest})"


# Any: what JSON holds.
def disagreements(nodes: Sequence[NodeFacts], views: Sequence[Mapping[str, Any]], *, run_dir: str, proof: str) -> str:
    """Return what some nodes see otherwise than node 0, a line each; empty: all see the same.

    Args:
        views: by rank: `proof`, and `paths` with what is seen at each.
    """
    lines = [
        f"{describe(node)} does not see what node 0 writes into run.dir={run_dir} ({Path(run_dir).absolute()}): put it "
        "on a file system that all nodes share, and start from the same working folder"
        for node, view in zip(nodes, views)
        if view["proof"] != proof
    ]
    for path, expected in views[0]["paths"].items():
        others = [(node, view["paths"][path]) for node, view in zip(nodes, views) if view["paths"][path] != expected]
        lines += [
            f"{path}: node 0 sees {expected}, {describe(node)} {seen} (share or copy it)" for node, seen in others
        ]
    return "\n".join(lines)
