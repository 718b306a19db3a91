"""`megappo inspect checkpoint`: what is in checkpoints, whether they are whole, and what a run can go on from."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megappo.checkpoint.health import is_in_checkpoint
from megappo.checkpoint.manifest import MANIFEST
from megappo.checkpoint.names import LATEST, checkpoints_in, step_of
from megappo.cli.checkpoint_content import (
    Facts,
    describe_checkpoint,
    describe_directory,
    describe_model_folder,
    describe_resume,
)
from megappo.config.store import load_run_config
from megappo.errors import CheckpointError
from megappo.models.description import MODEL_FILE

_WIDTH = 120
"""Columns that the tables need."""
_CHECKPOINTS = "checkpoints"


def inspect_checkpoint(path: Path, *, full: bool, as_json: bool, overrides: Sequence[str] | None) -> int:
    """Print what is in a checkpoint, in the checkpoints of a run, or in the folder of a model.

    Args:
        path: a checkpoint (`step_000050`), the folder of all of them, a run, or a model's folder (`actor`).
        full: compare the checksum of every file.
        as_json: print JSON.
        overrides: of the run that would go on, as for `megappo train`; None: no run is asked for.

    Returns:
        0; 1: the checkpoint (or the one that `resume=auto` takes) is damaged, or cannot be resumed as asked.

    Raises:
        CheckpointError: there is no checkpoint there.
        ConfigError: the overrides are wrong.
    """
    config = None if overrides is None else load_run_config(overrides)
    facts = _describe(path, full=full)
    chosen = facts["folder"] if facts["kind"] == "checkpoint" else facts.get("resume_auto", {}).get("folder")
    if config is not None and chosen is not None and facts.get("whole", True):
        facts["resume"] = describe_resume(Path(chosen), config) | {"folder": chosen}
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    healthy = {"checkpoint": facts.get("whole"), "checkpoints": chosen is not None, "model": "problem" not in facts}
    possible = facts["resume"]["possible"] if "resume" in facts else config is None
    return 0 if healthy[facts["kind"]] and possible else 1


def _describe(path: Path, *, full: bool) -> Facts:
    if (path / MANIFEST).exists() or (step_of(path.name) is not None and path.is_dir()):
        return describe_checkpoint(path, full=full)
    if (path / MODEL_FILE).exists() or (is_in_checkpoint(path) and path.is_dir()):
        return describe_model_folder(path, full=full)
    for directory in (path, path / _CHECKPOINTS):
        if checkpoints_in(directory) or (directory / LATEST).exists():
            return describe_directory(directory, full=full)
    raise CheckpointError(
        f"{path} holds no checkpoint (give a run such as runs/NAME, its folder checkpoints/, or one step in it)"
    )


def _print(facts: Facts) -> None:
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _WIDTH)
    if facts["kind"] == "checkpoints":
        _print_directory(console, facts)
    elif facts["kind"] == "checkpoint":
        _print_checkpoint(console, facts)
    else:
        console.print(facts["folder"])
        console.print(_models({Path(facts["folder"]).name: facts}))
    if "resume" in facts:
        _print_resume(console, facts["resume"])


def _print_directory(console: Console, facts: Facts) -> None:
    table = Table("step", "when", "MB", "health", "kept as")
    for row in facts["checkpoints"]:
        kept = ", ".join(row["kept"]) or ("goes at the next save" if row["whole"] else "")
        table.add_row(str(row["step"]), row["created"] or "-", _megabytes(row["bytes"]), _health(row), kept)
    console.print(f"{facts['folder']}: {LATEST} is {facts['latest'] or 'missing'}")
    console.print(table)
    if facts["others"]:
        console.print(f"no checkpoints: {', '.join(facts['others'])}")
    auto = facts["resume_auto"]
    for note in auto["notes"]:
        console.print(note)
    console.print(f"resume=auto goes on from {auto['folder']}" if auto["folder"] else "resume=auto is refused")


def _print_checkpoint(console: Console, facts: Facts) -> None:
    console.print(f"{facts['folder']}: step {_text(facts['step'])}, made {_text(facts['created'])}, ", end="")
    console.print(f"{_megabytes(facts['bytes'])} MB, {_health(facts)}")
    for note in facts["notes"]:
        console.print(f"note: {note}")
    if "roles" not in facts:
        return
    console.print(_models(facts["roles"]))
    rollouts = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in facts["rollouts"].items() if number)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    console.print(f"weight version  {_text(facts['weight_version'])}")
    console.print(f"position        {(facts['data'] or {}).get('drawn', '-')} prompts drawn")
    console.print(f"rollouts        {rollouts or 'none wait'}")
    console.print(f"versions        {versions or '-'}")


def _models(roles: dict[str, Facts]) -> Table:
    table = Table("model", "family", "parameters", "dtype", "lora", "optimizer", "saved by", "random states", "MB")
    for role, model in roles.items():
        if "architecture" not in model:
            table.add_row(role, model["problem"])
            continue
        layout = ", ".join(f"{axis} {size}" for axis, size in model["layout"].items())
        parameters = f"{model['parameters']:,}" if "parameters" in model else model["problem"]
        rank = "-" if model["lora"] is None else f"rank {model['lora']['rank']}"
        saved_by = f"{model['ranks']} ranks" + (f" ({layout})" if layout else "")
        family, states = model["architecture"]["family"], _text(model.get("random_states"))
        optimizer, size = model["optimizer"] or "none", _megabytes(model.get("bytes"))
        table.add_row(role, family, parameters, model["dtype"], rank, optimizer, saved_by, states, size)
    return table


def _print_resume(console: Console, resume: Facts) -> None:
    table = Table("verdict", "what differs")
    for difference in resume["differences"]:
        table.add_row(difference["verdict"], difference["text"])
    can = "can go on" if resume["possible"] else "cannot go on"
    console.print(f"this configuration {can} from {resume['folder']}" + ("" if resume["differences"] else ": equal"))
    if resume["differences"]:
        console.print(table)


def _health(row: Facts) -> str:
    return "whole" if row["whole"] else f"damaged: {'; '.join(row['problems'][:3])}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"
