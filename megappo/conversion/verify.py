"""Whether a checkpoint and a Hugging Face folder hold the same weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.conversion.checkpoint import ModelCheckpoint, open_checkpoint
from megappo.conversion.hugging_face import HuggingFaceModel, open_hugging_face
from megappo.device.together import run_together
from megappo.errors import CheckpointError
from megappo.weights.name_map import Partition


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What was found out."""

    num_tensors: int = 0
    num_bitwise: int = 0
    """Those of the same type and bits."""
    largest_difference: float = 0.0
    """Of any number, whatever the types; infinite where NaNs differ."""
    differing: dict[str, float] = field(default_factory=dict)
    """Hugging Face name -> largest difference, of those that are not the same bit by bit."""

    def add(self, other: "Comparison") -> None:
        """Take in what another process compared."""
        self.num_tensors += other.num_tensors
        self.num_bitwise += other.num_bitwise
        self.largest_difference = max(self.largest_difference, other.largest_difference)
        self.differing |= other.differing


def compare(
    path: Path, hf: Path, *, role: str | None, report: Callable[[int], None] = lambda num_bytes: None
) -> Comparison:
    """Compare all tensors, each process its share. Returns the result of all, on every process.

    Args:
        path, role: as in `open_checkpoint`.
        hf: Hugging Face folder.
        report: is told the bytes of each tensor that this process compared.

    Raises:
        CheckpointError: one of the two is damaged, they are of different models, or the checkpoint holds adapters only.
    """
    checkpoint, model = run_together(lambda: (open_checkpoint(path, role=role, hf=hf), open_hugging_face(hf)))
    if checkpoint.lora is not None:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters, not the weights of a model (convert it, and compare what comes out)"
        )
    if checkpoint.description.role != model.role:
        raise CheckpointError(f"{checkpoint.path} is an {checkpoint.description.role}, {hf} an {model.role}")
    run_together(checkpoint.check_bytes)
    own = run_together(lambda: _compare_share(checkpoint, model, report))
    shares: list[Comparison] = [own] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    total = Comparison()
    for share in shares:
        total.add(share)
    return total


def _compare_share(checkpoint: ModelCheckpoint, model: HuggingFaceModel, report: Callable[[int], None]) -> Comparison:
    result = Comparison()
    for name, ours, theirs in _pairs(checkpoint, model):
        result.num_tensors += 1
        if ours.dtype is theirs.dtype and torch.equal(_bits(ours), _bits(theirs)):
            result.num_bitwise += 1
        else:
            difference = _difference(ours, theirs)
            result.differing[name] = difference
            result.largest_difference = max(result.largest_difference, difference)
        report(ours.nbytes)
    return result


def _pairs(checkpoint: ModelCheckpoint, model: HuggingFaceModel) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for tensor in model.tensors[dist.get_rank() :: dist.get_world_size()]:
        for name, ours in zip(tensor.hugging_face, tensor.split(checkpoint.read(tensor), checkpoint.model)):
            yield name, ours.contiguous(), model.read(name, Partition.replicated, rank=0, size=1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of two numbers at the same place."""
    difference = (ours.double() - theirs.double()).abs()
    same = (ours.isnan() & theirs.isnan()) | (ours == theirs)
    largest = difference.masked_fill(same, 0).max()
    return float("inf") if largest.isnan() else float(largest)
