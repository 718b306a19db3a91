"""What a conversion would do, as a table: one line per tensor of the checkpoint."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

from megappo.conversion.layout import StoredPart
from megappo.conversion.reshard import ReshardPlan
from megappo.conversion.stored import StoredTensor
from megappo.conversion.to_hugging_face import HuggingFacePlan
from megappo.conversion.to_megatron import MegatronPlan, PlannedItem
from megappo.weights.buckets import torch_dtype

_HEADS = ("Hugging Face", "Megatron", "transform", "shape", "dtype", "bytes")
Row = tuple[str, ...]


def megatron_table(plan: MegatronPlan) -> Iterator[str]:
    """Yield the lines for a Hugging Face folder: with each tensor, which ranks of the layout hold its shards."""
    rows: list[Row] = []
    parts = [planned.part for planned in sorted(plan.items, key=lambda planned: planned.part.rank)]
    held: dict[str, list[StoredPart]] = {}
    for part in parts:
        held.setdefault(part.tensor.key, []).append(part)
    for tensor in plan.source.tensors:
        rows.append((*_row(tensor, plan.dtype.value), _ranks(held[tensor.key])))
    return _lines((*_HEADS, "ranks"), rows)


def hugging_face_table(plan: HuggingFacePlan) -> Iterator[str]:
    """Yield the lines for a checkpoint: with each tensor, the files that its Hugging Face tensors are written to."""
    files: dict[str, tuple[StoredTensor, list[str]]] = {}
    for name, file in zip(plan.file_names, plan.files):
        for tensor, _ in groupby(tensor for tensor, _ in file.sources):
            files.setdefault(tensor.key, (tensor, []))[1].append(name)
    rows = [(*_row(tensor, plan.dtype.value), ", ".join(names)) for tensor, names in files.values()]
    return _lines((*_HEADS, "files"), rows)


def reshard_table(plan: ReshardPlan) -> Iterator[str]:
    """Yield the lines for a checkpoint that is rewritten: with each tensor, which ranks hold its shards."""
    rows: list[Row] = []
    for model in plan.models:
        held: dict[str, list[PlannedItem]] = {}
        for planned in sorted(model.items, key=lambda planned: planned.part.rank):
            held.setdefault(planned.item.key, []).append(planned)
        for key, planned in held.items():
            item = planned[0].item
            num_bytes = sum(one.item.num_bytes for one in planned)
            dtype = str(item.dtype).removeprefix("torch.")
            ranks = _ranks([one.part for one in planned])
            role = model.checkpoint.description.role
            rows.append((role, key, str(list(item.global_shape)), dtype, f"{num_bytes:,}", ranks))
    return _lines(("role", "Megatron", "shape", "dtype", "bytes", "ranks"), rows)


def _row(tensor: StoredTensor, dtype: str) -> Row:
    num_bytes = math.prod(tensor.shape) * torch_dtype(dtype).itemsize
    names = " + ".join(tensor.hugging_face)
    return names, tensor.key, tensor.transform.value, str(list(tensor.shape)), dtype, f"{num_bytes:,}"


def _ranks(parts: list[StoredPart]) -> str:
    """Say which ranks hold the shards of a tensor."""
    ranks = ", ".join(str(part.rank) for part in parts)
    if parts[0].size == 1:
        return f"whole on {ranks}"
    return f"dim {parts[0].tensor.partition.value} over {ranks}"


def _lines(heads: Row, rows: Iterable[Row]) -> Iterator[str]:
    table = [heads, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
