"""A Hugging Face folder into the weights of a checkpoint, cut for a layout."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.config.model import Dtype
from megappo.config.parallelism import ParallelismConfig
from megappo.conversion.hugging_face import HuggingFaceModel, open_hugging_face
from megappo.conversion.layout import StoredPart, check_layout, cut_tensors, trainer_layout
from megappo.conversion.output import Output
from megappo.conversion.torch_dist import StoredItem, finish_stored, write_stored
from megappo.device.together import run_together
from megappo.models.architecture import read_config
from megappo.models.description import MODEL_FILE, ModelDescription
from megappo.models.written_config import config_changes
from megappo.weights.buckets import torch_dtype


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedItem:
    """What one process writes, and of which part."""

    item: StoredItem
    part: StoredPart
    process: int


@dataclass(kw_only=True, slots=True, frozen=True)
class MegatronPlan:
    """A conversion that has been checked and can be written."""

    source: HuggingFaceModel
    layout: ParallelismConfig
    dtype: Dtype
    items: list[PlannedItem]

    @property
    def num_bytes(self) -> int:
        return sum(planned.item.num_bytes for planned in self.items)


def plan_to_megatron(hf: Path, layout: ParallelismConfig, *, dtype: Dtype | None) -> MegatronPlan:
    """Check a folder and say what becomes of it. Nothing is written.

    Args:
        dtype: of the weights that are written; None: that of the folder.

    Raises:
        CheckpointError, CapabilityError: as `open_hugging_face`.
        ConfigError: the layout does not suit the model.
    """
    source = open_hugging_face(hf)
    check_layout(layout, source.architecture)
    dtype = dtype or source.own_dtype()
    parts = cut_tensors(source.tensors, layout, num_layers=source.model.num_layers)
    return MegatronPlan(
        source=source,
        layout=layout,
        dtype=dtype,
        items=plan_items(parts, {part.tensor.key: torch_dtype(dtype.value) for part in parts}),
    )


def plan_items(parts: list[StoredPart], dtypes: dict[str, torch.dtype]) -> list[PlannedItem]:
    """Return what is written of parts: each rank of the layout has a file, or several where there are more processes.

    Args:
        dtypes: key -> type that is written.
    """
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    num_ranks = 1 + max(part.rank for part in parts)
    files = -(-num_processes // num_ranks)
    written: dict[tuple[int, int], int] = {(rank, file): 0 for rank in range(num_ranks) for file in range(files)}
    items: list[PlannedItem] = []
    for part in parts:
        # The emptiest file of the rank.
        file = min(range(files), key=lambda file: written[part.rank, file])
        item = StoredItem(
            key=part.tensor.key,
            file=f"__{part.rank}_{file}.distcp",
            offset=part.offset,
            shape=part.shape,
            global_shape=part.tensor.shape,
            dtype=dtypes[part.tensor.key],
        )
        written[part.rank, file] += item.num_bytes
        process = (part.rank * files + file) % num_processes
        items.append(PlannedItem(item=item, part=part, process=process))
    return sorted(items, key=lambda planned: planned.item.file)


def write_megatron(plan: MegatronPlan, output: Output, report: Callable[[int], None]) -> None:
    """Write the folder; all processes call it.

    Args:
        report: is told the bytes of each part that this process has read.

    Raises:
        CheckpointError: on every process; no folder appears.
    """
    is_first = dist.get_rank() == 0
    own = {planned.item: planned.part for planned in plan.items if planned.process == dist.get_rank()}

    def read(item: StoredItem) -> torch.Tensor:
        part = own[item]
        tensors = [
            plan.source.read(name, part.tensor.partition, rank=part.shard, size=part.size)
            for name in part.tensor.hugging_face
        ]
        report(item.num_bytes)
        merged = part.tensor.merge(tensors, plan.source.model, size=part.size)
        return merged.to(item.dtype)

    with output.written():
        write_stored(output.aside, list(own), read)
        run_together(lambda: _finish(plan, output) if is_first else None)


def _finish(plan: MegatronPlan, output: Output) -> None:
    source = plan.source
    description = ModelDescription.of(
        source.role,
        source.architecture,
        dtype=plan.dtype,
        parallelism=plan.layout,
        world_size=trainer_layout(plan.layout).world_size,
    )
    finish_stored(output.aside, common={})
    output.write(MODEL_FILE, description.to_json())
    changes = config_changes(
        read_config(source.path), dtype=plan.dtype.value, has_value_head=source.model.has_value_head
    )
    output.finish(side=source.path, config_changes=changes)
