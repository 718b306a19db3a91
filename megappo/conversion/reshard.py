"""A checkpoint rewritten for another layout, with the state of the optimizers or without.

Nothing needs this: a checkpoint loads under any layout. What it gives is a faster load where many ranks would each read
whole tensors to keep a part of them, another number of files, or, without the optimizer, a third of the bytes.
"""

import io
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.checkpoint.manifest import MANIFEST, FileRecord, Manifest, read_manifest, record_files
from megappo.config.parallelism import ParallelismConfig
from megappo.conversion.checkpoint import ModelCheckpoint, open_checkpoint, read_common, weight_key
from megappo.conversion.layout import check_layout, cut_tensors, trainer_layout
from megappo.conversion.output import Output
from megappo.conversion.to_megatron import PlannedItem, plan_items
from megappo.conversion.torch_dist import StoredItem, finish_stored, write_stored
from megappo.device.together import run_together
from megappo.errors import CheckpointError, ConfigError, Violation
from megappo.models.description import MODEL_FILE

_OBJECTS_FILE = "__0_0.distcp"
"""Where the random states of the ranks go, which are of the layout that wrote them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelPlan:
    """What is written of one model."""

    checkpoint: ModelCheckpoint
    items: list[PlannedItem]
    objects: list[StoredItem]

    @property
    def num_bytes(self) -> int:
        return sum(planned.item.num_bytes for planned in self.items)


@dataclass(kw_only=True, slots=True, frozen=True)
class ReshardPlan:
    """A rewriting that has been checked."""

    source: Path
    layout: ParallelismConfig
    models: list[ModelPlan]
    manifest: Manifest | None
    """Of the whole checkpoint that is rewritten; None: the weights of one model."""

    @property
    def num_bytes(self) -> int:
        return sum(model.num_bytes for model in self.models)


def plan_reshard(
    path: Path, layout: ParallelismConfig, *, weights_only: bool, role: str | None, hf: Path | None
) -> ReshardPlan:
    """Check a checkpoint and say what is written; arguments as `open_checkpoint`. Nothing is written.

    Args:
        layout: the same for all models of the checkpoint.
        weights_only: write the weights of one model, as `to_megatron` does, instead of a checkpoint to resume from.

    Raises:
        CheckpointError: as `open_checkpoint`, or there is nothing to resume from in the folder.
        ConfigError: the layout does not suit a model, or one role is asked for where all are written.
    """
    manifest = read_manifest(path) if (path / MANIFEST).is_file() else None
    if weights_only or manifest is None:
        checkpoint = open_checkpoint(path, role=role, hf=hf)
        if not weights_only and checkpoint.description.optimizer is not None:
            raise CheckpointError(
                f"{path} is one model of a checkpoint (give the folder of all of it, {path.resolve().parent}, "
                "or --weights-only)"
            )
        models = [_plan_model(checkpoint, layout, weights_only=True)]
        return ReshardPlan(source=path, layout=layout, models=models, manifest=None)
    if role is not None:
        rule = "is for --weights-only: a checkpoint to resume from has all its models"
        remedy = "add --weights-only, or leave it out"
        raise ConfigError([Violation(key="--role", value=role, rule=rule, remedy=remedy)])
    checkpoints = [open_checkpoint(path, role=name, hf=hf) for name in manifest.roles]
    models = [_plan_model(checkpoint, layout, weights_only=False) for checkpoint in checkpoints]
    return ReshardPlan(source=path, layout=layout, models=models, manifest=manifest)


def _plan_model(checkpoint: ModelCheckpoint, layout: ParallelismConfig, *, weights_only: bool) -> ModelPlan:
    check_layout(layout, checkpoint.architecture)
    found = checkpoint.folder.tensors()
    dtypes = {key: entry.properties.dtype for key, entry in found.items()}
    parts = cut_tensors(checkpoint.tensors, layout, num_layers=checkpoint.model.num_layers)
    objects: list[StoredItem] = []
    if not weights_only:
        by_key: dict[str | None, list[str]] = {}
        for key in found:
            by_key.setdefault(weight_key(key), []).append(key)
        # The state of an optimizer is cut as its weight is.
        parts += [
            replace(part, tensor=replace(part.tensor, key=key))
            for part in parts
            for key in by_key.get(part.tensor.key, ())
        ]
        objects = [StoredItem(key=key, file=_OBJECTS_FILE) for key in checkpoint.folder.entries if key not in found]
    return ModelPlan(checkpoint=checkpoint, items=plan_items(parts, dtypes), objects=objects)


def write_reshard(plan: ReshardPlan, output: Output, report: Callable[[int], None]) -> None:
    """Write the folder; all processes call it.

    Args:
        report: is told the bytes of each part that this process has read.

    Raises:
        CheckpointError: on every process; no folder appears.
    """
    is_first = dist.get_rank() == 0
    for model in plan.models:
        run_together(model.checkpoint.check_bytes)
    with output.written():
        if plan.manifest is None:
            (model,) = plan.models
            _write_model(model, output.aside, report)
            run_together(lambda: _finish_weights(plan, model, output) if is_first else None)
            return
        records: list[FileRecord] = []
        for model in plan.models:
            records += _write_role(model, output.aside / model.checkpoint.description.role, report)
        manifest = plan.manifest
        run_together(lambda: records, then=lambda shares: _finish_all(plan, manifest, output, shares))


def _write_model(model: ModelPlan, folder: Path, report: Callable[[int], None]) -> list[str]:
    """Write this process's share of one model. Returns the names of its files."""
    rank = dist.get_rank()
    own = [planned.item for planned in model.items if planned.process == rank]
    if rank == 0:
        own = sorted(own + model.objects, key=lambda item: item.file)

    def read(item: StoredItem) -> torch.Tensor | io.BytesIO:
        report(item.num_bytes)
        if item.shape is None:
            return model.checkpoint.folder.read_object(item.key)
        return model.checkpoint.folder.read(item.key, item.offset, item.shape)

    write_stored(folder, own, read)
    return sorted({item.file for item in own})


def _write_role(model: ModelPlan, folder: Path, report: Callable[[int], None]) -> list[FileRecord]:
    """Write this process's share of a model with its optimizer. Returns the records of its files."""
    is_first = dist.get_rank() == 0
    run_together(lambda: folder.mkdir() if is_first else None)
    names = _write_model(model, folder, report)

    def record() -> list[FileRecord]:
        if is_first:
            finish_stored(folder, common=read_common(model.checkpoint.path))
            # As it was: the random states are those of the ranks that wrote them.
            shutil.copy(model.checkpoint.path / MODEL_FILE, folder / MODEL_FILE)
            names.extend(path.name for path in folder.iterdir() if not path.name.endswith(".distcp"))
        return record_files(folder.parent, [folder / name for name in names])

    return run_together(record)


def _finish_weights(plan: ReshardPlan, model: ModelPlan, output: Output) -> None:
    checkpoint = model.checkpoint
    # By its frozen weights, adapters are told to belong to a model.
    common = {} if checkpoint.lora is None else {"frozen_sum": read_common(checkpoint.path)["frozen_sum"]}
    finish_stored(output.aside, common=common)
    description = replace(
        checkpoint.description,
        optimizer=None,
        parallelism=asdict(plan.layout),
        world_size=trainer_layout(plan.layout).world_size,
    )
    output.write(MODEL_FILE, description.to_json())
    output.finish(side=checkpoint.side)


def _finish_all(plan: ReshardPlan, manifest: Manifest, output: Output, shares: Sequence[list[FileRecord]]) -> None:
    """Add what is of no model, and the manifest of it all."""
    records = [record for share in shares for record in share]
    roles = {model.checkpoint.description.role for model in plan.models}
    others = [record for record in manifest.files if record.path.partition("/")[0] not in roles]
    for record in others:
        target = output.aside / record.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(plan.source / record.path, target)
    files = sorted(others + records, key=lambda record: record.path)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    output.write(MANIFEST, replace(manifest, files=files, created=created).to_json())
    output.finish(side=None)
