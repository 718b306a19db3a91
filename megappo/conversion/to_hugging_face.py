"""The weights of a checkpoint into a Hugging Face folder; adapters are merged, or written alone as PEFT has them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.conversion.adapters import adapter_config, adapter_file_name, peft_name
from megappo.conversion.checkpoint import ModelCheckpoint, open_checkpoint, read_common
from megappo.conversion.hugging_face import (
    HuggingFaceModel,
    WeightFile,
    has_tokenizer,
    open_hugging_face,
    plan_files,
    write_file,
)
from megappo.conversion.output import Output
from megappo.conversion.stored import StoredTensor, stored_tensors
from megappo.device.together import run_together
from megappo.errors import CheckpointError, ConfigError, Violation
from megappo.models.architecture import read_config
from megappo.models.written_config import config_changes
from megappo.weights.buckets import torch_dtype
from megappo.weights.checksums import bit_sum
from megappo.weights.name_map import Partition
from megappo.weights.safetensors_io import shard_files

_SUMMED_AT_ONCE = 1 << 20
"""Elements of a weight that are summed with their update at a time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HuggingFacePlan:
    """A conversion that has been checked and can be written."""

    checkpoint: ModelCheckpoint
    base: HuggingFaceModel | None
    """The weights beside adapters, where they are merged."""
    dtype: Dtype
    files: list[WeightFile]
    adapters_only: bool

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer will lie beside the weights."""
        return has_tokenizer(self.checkpoint.side)

    @property
    def file_names(self) -> list[str]:
        return [adapter_file_name()] if self.adapters_only else shard_files(len(self.files))


def plan_to_hugging_face(
    path: Path,
    *,
    role: str | None,
    hf: Path | None,
    dtype: Dtype | None,
    max_file_bytes: int,
    adapters_only: bool = False,
) -> HuggingFacePlan:
    """Check a checkpoint and say what becomes of it; arguments as `open_checkpoint`. Nothing is written.

    Args:
        dtype: of the weights that are written; None: that of the checkpoint.
        max_file_bytes: of a weight file; a larger tensor has one of its own.
        adapters_only: write the adapters, as PEFT has them, instead of their sum with the model.

    Raises:
        CheckpointError, CapabilityError: as `open_checkpoint` and, for the model beside adapters, `open_hugging_face`.
        ConfigError: there are no adapters.
    """
    checkpoint = open_checkpoint(path, role=role, hf=hf)
    if adapters_only and checkpoint.lora is None:
        remedy = "leave the option out: the checkpoint holds all weights"
        rule = f"is for checkpoints of adapters, {checkpoint.path} has none"
        raise ConfigError([Violation(key="--adapters-only", value=True, rule=rule, remedy=remedy)])
    dtype = dtype or Dtype(checkpoint.description.dtype)
    if adapters_only:
        # PEFT reads one file.
        files = plan_files([peft_name(tensor) for tensor in checkpoint.tensors], dtype, sys.maxsize)
    else:
        files = plan_files(stored_tensors(checkpoint.model), dtype, max_file_bytes)
    return HuggingFacePlan(
        checkpoint=checkpoint,
        base=open_hugging_face(checkpoint.side) if checkpoint.lora and not adapters_only else None,
        dtype=dtype,
        files=files,
        adapters_only=adapters_only,
    )


def write_hugging_face(plan: HuggingFacePlan, output: Output, report: Callable[[int], None]) -> None:
    """Write the folder; all processes call it.

    Args:
        report: is told the bytes of each tensor that this process has written.

    Raises:
        CheckpointError: on every process; no folder appears.
    """
    source = _Merged(plan) if plan.base is not None else _Plain(plan)
    own = list(zip(plan.file_names, plan.files))[dist.get_rank() :: dist.get_world_size()]

    run_together(plan.checkpoint.check_bytes)

    def write() -> dict[str, int]:
        for name, file in own:
            write_file(output.aside / name, file, source.read, report)
        return source.base_sums

    def finish(sums: list[dict[str, int]]) -> None:
        _check_base(plan, sums)
        _finish(plan, output)

    with output.written():
        run_together(write, then=finish)


class _Plain:
    """Tensors as the checkpoint has them."""

    def __init__(self, plan: HuggingFacePlan) -> None:
        self._checkpoint = plan.checkpoint
        self._dtype = torch_dtype(plan.dtype.value)
        self.base_sums: dict[str, int] = {}

    def read(self, tensor: StoredTensor) -> list[torch.Tensor]:
        """Return the Hugging Face tensors of one of the checkpoint."""
        parts = tensor.split(self._checkpoint.read(tensor), self._checkpoint.model)
        return [part.to(self._dtype) for part in parts]


class _Merged:
    """Sums of the starting model and the adapters; what was trained beside them (a value head) as it is."""

    def __init__(self, plan: HuggingFacePlan) -> None:
        assert plan.base is not None and plan.checkpoint.lora is not None
        self._checkpoint, self._base, self._lora = plan.checkpoint, plan.base, plan.checkpoint.lora
        self._dtype = torch_dtype(plan.dtype.value)
        self._trained_dtype = torch_dtype(plan.checkpoint.description.dtype)
        self._trained = {tensor.key: tensor for tensor in plan.checkpoint.tensors}
        self.base_sums: dict[str, int] = {}
        """Key -> sum over the bits of a weight as it was trained."""

    def read(self, tensor: StoredTensor) -> list[torch.Tensor]:
        """Return the Hugging Face tensors of one of the model."""
        if tensor.key in self._trained:
            return [self._checkpoint.read(tensor).to(self._dtype)]
        parts = [
            self._base.read(name, Partition.replicated, rank=0, size=1).to(self._trained_dtype)
            for name in tensor.hugging_face
        ]
        self.base_sums[tensor.key] = bit_sum(tensor.key, tensor.merge(parts, self._checkpoint.model))
        return [self._sum(name, part) for name, part in zip(tensor.hugging_face, parts)]

    def _sum(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Add the update of a matrix, in fp32 a few rows at a time."""
        keys = [f"{name.removesuffix('.weight')}.lora_{factor}.weight" for factor in "AB"]
        if not all(key in self._trained for key in keys):
            return weight.to(self._dtype)
        down, up = (self._checkpoint.read(self._trained[key]).float() for key in keys)
        total = torch.empty(weight.shape, dtype=self._dtype)
        rows = max(1, _SUMMED_AT_ONCE // weight.shape[-1])
        for to, base, factor in zip(*(part.split(rows) for part in (total, weight, up))):
            to.copy_(base.float() + _scale(self._lora) * (factor @ down))
        return total


def _scale(lora: LoraConfig) -> float:
    return lora.alpha / lora.rank


def _check_base(plan: HuggingFacePlan, sums: list[dict[str, int]]) -> None:
    """Refuse adapters that were merged into another model than the one beside which they were trained."""
    if plan.base is None:
        return
    merged = {key: value for own in sums for key, value in own.items()}
    if sum(merged.values()) != read_common(plan.checkpoint.path)["frozen_sum"]:
        raise CheckpointError(
            f"{plan.base.path} is not the model beside which the adapters of {plan.checkpoint.path} were trained: its "
            "weights differ (give that model as --hf DIR)"
        )


def _finish(plan: HuggingFacePlan, output: Output) -> None:
    checkpoint = plan.checkpoint
    if plan.adapters_only:
        assert checkpoint.lora is not None
        output.write(
            "adapter_config.json", adapter_config(checkpoint.lora, checkpoint.side, checkpoint.description.role)
        )
        output.finish(side=None)
        return
    changes = config_changes(
        read_config(checkpoint.side), dtype=plan.dtype.value, has_value_head=checkpoint.model.has_value_head
    )
    output.finish(side=checkpoint.side, config_changes=changes, buckets=[file.bucket for file in plan.files])
