"""What is in checkpoints, as plain facts for `megappo inspect checkpoint`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megappo.checkpoint.differences import Difference, Verdict, compare_configs, read_config
from megappo.checkpoint.health import (
    Checksums,
    Health,
    check,
    is_in_checkpoint,
    model_problems,
    newest_whole,
    read_pointer,
)
from megappo.checkpoint.names import checkpoints_in, entries, step_of
from megappo.checkpoint.reading import read_arrays, read_object
from megappo.checkpoint.retention import best_step, reasons_to_keep
from megappo.checkpoint.scores import read_scores
from megappo.config.checkpoint import BestMode, CheckpointConfig, OnDamaged
from megappo.config.lora import LoraConfig
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.errors import CheckpointError, listed
from megappo.models.architecture import read_architecture
from megappo.models.description import MODEL_FILE, read_description
from megappo.observability.versions import VERSIONS_FILE

Facts = dict[str, Any]  # Any: values of a JSON object


def describe_directory(directory: Path, *, full: bool) -> Facts:
    """Return what is known of every checkpoint of a run, and which one `resume=auto` takes.

    Args:
        full: read every file, for its checksum.
    """
    checkpoints = checkpoints_in(directory)
    checksums = Checksums.full if full else Checksums.none
    healths = {step: check(folder, checksums) for step, folder in checkpoints.items()}
    whole = [step for step, health in healths.items() if health.is_whole]
    pointer = read_pointer(directory)
    reasons = _reasons(directory, whole, pointer)
    rows = [_row(step, checkpoints[step], health) | {"kept": reasons.get(step, [])} for step, health in healths.items()]
    named = {path.name for path in entries(directory) if path.name.startswith("step_")}
    return {
        "kind": "checkpoints",
        "folder": str(directory),
        "latest": pointer,
        "resume_auto": _chosen(directory),
        "checkpoints": rows,
        "others": sorted(named - {path.name for path in checkpoints.values()}),
    }


def _row(step: int, folder: Path, health: Health) -> Facts:
    manifest = health.manifest
    return {
        "step": step,
        "folder": str(folder),
        "created": None if manifest is None else manifest.created,
        "bytes": None if manifest is None else manifest.num_bytes,
        "whole": health.is_whole,
        "problems": health.problems,
        "notes": health.notes,
    }


def _chosen(directory: Path) -> Facts:
    """Return what `resume=auto` would do."""
    try:
        found = newest_whole(directory, OnDamaged.previous)
    except CheckpointError as error:
        return {"folder": None, "notes": str(error).splitlines()}
    return {"folder": None if found is None else str(found.folder), "notes": [] if found is None else found.notes}


def _reasons(directory: Path, whole: Sequence[int], pointer: str | None) -> dict[int, list[str]]:
    """Return why the next save keeps a checkpoint, by the configuration of the newest whole one."""
    if not whole:
        return {}
    try:
        keep = _keep_of(read_config(checkpoints_in(directory)[max(whole)]))
    except CheckpointError:
        return {}
    scores = {} if keep.keep_best is None else read_scores(directory, keep.keep_best).values
    best = best_step(scores, whole, keep.best_mode)
    return reasons_to_keep(whole, keep, best=best, pointed=step_of(pointer or ""))


def _keep_of(config: Mapping[str, Any]) -> CheckpointConfig:  # Any: the values of a configuration as YAML holds them
    """Return what a saved configuration says of keeping; keys that it has not are at their defaults."""
    section: Facts = config.get("checkpoint", {})
    default = CheckpointConfig()
    return CheckpointConfig(
        keep_last=section.get("keep_last", default.keep_last),
        keep_every=section.get("keep_every"),
        keep_best=section.get("keep_best"),
        best_mode=BestMode[section.get("best_mode", default.best_mode.name)],
    )


def describe_checkpoint(folder: Path, *, full: bool) -> Facts:
    """Return what is in one checkpoint and whether it is whole. What cannot be read is a problem, or left out."""
    health = check(folder, Checksums.full if full else Checksums.small)
    manifest = health.manifest
    facts = {"kind": "checkpoint"} | _row(-1 if manifest is None else manifest.step, folder, health)
    if manifest is None:
        return facts | {"step": None}
    sizes = {role: sum(record.num_bytes for record in manifest.files_of(role)) for role in manifest.roles}
    roles = {role: describe_model(folder / role) | {"bytes": size} for role, size in sizes.items()}
    # A format that this version does not read.
    unread = [f"{role}: {model['problem']}" for role, model in roles.items() if "problem" in model]
    facts |= {"whole": health.is_whole and not unread, "problems": [*health.problems, *unread], "roles": roles}
    if not health.is_whole:
        return facts | {"weight_version": None, "data": None, "rollouts": {}, "versions": {}}
    loop = _read_if_there(folder / "loop.json")
    return facts | {
        "weight_version": loop.get("weight_version"),
        "data": loop.get("position", {}).get("sampler"),
        "rollouts": _describe_rollouts(folder / "rollouts", loop),
        "versions": _read_if_there(folder / VERSIONS_FILE),
    }


def describe_model_folder(folder: Path, *, full: bool) -> Facts:
    """Return what is in the folder of one model, and what is wrong with it by the manifest beside it, where there is
    one."""
    facts = {"kind": "model", "folder": str(folder)}
    if is_in_checkpoint(folder):
        try:
            problems = model_problems(folder, Checksums.full if full else Checksums.small)
        except CheckpointError as error:
            problems = [str(error)]
        if problems:
            return facts | {"problem": listed(problems)}
    return facts | describe_model(folder)


def describe_model(folder: Path) -> Facts:
    """Return what is in the folder of one model; without what its files do not tell."""
    try:
        description = read_description(folder)
    except CheckpointError as error:
        return {"problem": str(error)}
    facts: Facts = {
        "architecture": description.architecture,
        "dtype": description.dtype,
        "lora": None if description.lora is None else asdict(LoraConfig(**description.lora)),
        "optimizer": description.optimizer,
        "ranks": description.world_size,
        "layout": {axis: size for axis, size in description.parallelism.items() if isinstance(size, int) and size > 1},
    }
    # torch takes seconds to import.
    from megappo.conversion.checkpoint import OPTIMIZER_PREFIX
    from megappo.conversion.torch_dist import StoredFolder

    try:
        stored = StoredFolder(folder)
    except CheckpointError as error:
        return facts | {"problem": str(error)}
    sizes = {key: entry.size.numel() for key, entry in stored.tensors().items()}
    weights = [key for key in sizes if not key.startswith(OPTIMIZER_PREFIX)]
    return facts | {
        "parameters": sum(sizes[key] for key in weights),
        "tensors": len(weights),
        "optimizer_tensors": len(sizes) - len(weights),
        "random_states": sum(key.startswith("random/") for key in stored.entries),
    }


def _describe_rollouts(folder: Path, loop: Facts) -> Facts:
    """Return how much was sampled that no step has trained on."""
    waiting = _read_if_there(folder / "waiting.json")
    following = waiting.get("next_step")
    facts: Facts = {
        "carried_sequences": len(waiting.get("carried", {}).get("sequences", [])),
        "next_step_sequences": 0 if following is None else len(following["train"]["sequences"]),
        "unfinished_sequences": 0,
        "open_draws": len(loop.get("position", {}).get("open_draws", [])),
    }
    begun = folder / "begun.npz"
    if begun.exists():
        facts["unfinished_sequences"] = len(read_arrays(begun)["sequence_ids"])
    return facts


def _read_if_there(path: Path) -> Facts:
    """Return what a file of the loop holds, which is as it was written; nothing where this kind of run has none."""
    return read_object(path) if path.exists() else {}


def describe_resume(folder: Path, config: RunConfig) -> Facts:
    """Return whether a run of this configuration can go on from a checkpoint, and everything that differs.

    Raises:
        CheckpointError: the checkpoint holds no configuration that can be read.
    """
    differences = compare_configs(read_config(folder), yaml.safe_load(resolved_yaml(config)))
    differences += _model_differences(folder, config)
    refused = [difference for difference in differences if difference.verdict is Verdict.refused]
    return {
        "possible": not refused,
        "differences": [
            asdict(difference) | {"verdict": difference.verdict.name, "text": str(difference)}
            for difference in differences
        ],
    }


def _model_differences(folder: Path, config: RunConfig) -> list[Difference]:
    """Compare the architecture of the starting model with that of the actor in the checkpoint, where both are there."""
    if not (folder / "actor" / MODEL_FILE).exists() or not Path(config.model.path, "config.json").exists():
        return []
    saved = read_description(folder / "actor").architecture
    wanted: Facts = json.loads(json.dumps(asdict(read_architecture(config.model.path))))
    return [
        Difference(
            key=f"config.json of model.path: {name}",
            saved=saved.get(name),
            wanted=wanted[name],
            verdict=Verdict.refused,
            reason="the checkpoint holds another model",
        )
        for name in wanted
        if saved.get(name) != wanted[name]
    ]
