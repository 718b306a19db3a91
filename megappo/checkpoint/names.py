"""Names in the folder of all checkpoints of a run, and which of them are checkpoints.

    latest                   names the newest: `step_000050`
    scores.json              values of the metric that decides which one is the best (`scores.py`)
    step_000050/             appears by one rename, when whole
    step_000060.writing/     under way
    step_000040.deleting/    on its way out
    step_000050.replaced/    was whole, and makes room for another of the same step
    step_000070.set_aside/   is newer than the one that a run went on from; people may delete it

Only the driver of a run removes or renames any of them.
"""

import re
from pathlib import Path

from megappo.checkpoint.disk import explained

LATEST = "latest"
SCORES = "scores.json"
WRITING = ".writing"
DELETING = ".deleting"
REPLACED = ".replaced"
SET_ASIDE = ".set_aside"


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder of this name holds; None: it is no checkpoint."""
    found = re.fullmatch(r"step_(\d{6,})", name)
    return None if found is None else int(found.group(1))


def checkpoints_in(directory: Path) -> dict[int, Path]:
    """Return step -> folder of the checkpoints of a run, oldest first, damaged ones included.

    One that was being replaced counts while the new one does not have its name.

    Raises:
        CheckpointError: the directory is there and cannot be read: it must not pass for an empty one.
    """
    found: dict[int, Path] = {}
    for path in entries(directory):
        step = step_of(path.name.removesuffix(REPLACED))
        if step is not None and path.is_dir():
            found.setdefault(step, path)
    return dict(sorted(found.items()))


def leftovers_in(directory: Path) -> list[Path]:
    """Return what a run that was killed left half written or half removed. Raises as `checkpoints_in`."""
    own = [path for path in entries(directory) if path.name.startswith(("step_", LATEST, SCORES))]
    return [path for path in own if path.suffix in (WRITING, DELETING)]


def entries(directory: Path) -> list[Path]:
    """Return what is in the directory, by name; nothing where there is none. Raises as `checkpoints_in`."""
    with explained(f"{directory} cannot be read"):
        return sorted(directory.iterdir()) if directory.exists() else []
