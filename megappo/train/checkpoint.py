"""Checkpoints of one trainer for the same layout: a file per rank, and one that says what they belong to.

Frozen weights (those beside adapters) are not written: they come from the starting model, of which a checkpoint holds
the sums, so that another one is noticed.

The caller makes the folder, and moves it to its final name once all ranks have written their file; nothing here waits
for other ranks.
"""

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.errors import CheckpointError
from megappo.models.architecture import ModelArchitecture
from megappo.train.optimizer import ModelOptimizer

_LAYOUT_FILE = "layout.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointLayout:
    """What the files of a checkpoint fit."""

    role: str
    """actor or critic."""
    architecture: dict[str, Any]  # Any: the fields of ModelArchitecture
    parallelism: dict[str, Any]  # Any: the fields of ParallelismConfig
    world_size: int
    dtype: str
    optimizer: str
    distributed_optimizer: bool
    lora: dict[str, Any] | None  # Any: the fields of LoraConfig

    @classmethod
    def of(
        cls,
        role: str,
        architecture: ModelArchitecture,
        *,
        parallelism: ParallelismConfig,
        dtype: Dtype,
        optim: OptimConfig,
        lora: LoraConfig | None,
    ) -> "CheckpointLayout":
        """Describe a trainer of this process's world."""
        return cls(
            role=role,
            architecture=asdict(architecture),
            parallelism=asdict(parallelism),
            world_size=dist.get_world_size(),
            dtype=dtype.value,
            optimizer=optim.name.value,
            distributed_optimizer=optim.distributed,
            lora=None if lora is None else asdict(lora),
        )


def save_checkpoint(
    folder: str, chunks: Sequence[MegatronModule], optimizer: ModelOptimizer, layout: CheckpointLayout
) -> None:
    """Write this rank's weights, optimizer state, step numbers and random states into the existing `folder`.

    Raises:
        CheckpointError: the files cannot be written.
    """
    state = {
        "weights": [_weights(chunk) for chunk in chunks],
        "frozen_sums": [_frozen_sums(chunk) for chunk in chunks],
        "optimizer": optimizer.state_dict(),
        "random": _random_state(),
    }
    rank = dist.get_rank()
    try:
        torch.save(state, _rank_file(folder, rank))
        if rank == 0:
            (Path(folder) / _LAYOUT_FILE).write_text(json.dumps(asdict(layout), indent=2), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"rank {rank} cannot write a checkpoint to {folder}: {error}") from error


def load_checkpoint(
    folder: str, chunks: Sequence[MegatronModule], optimizer: ModelOptimizer, layout: CheckpointLayout
) -> None:
    """Put back what `save_checkpoint` wrote. Nothing is changed when the checkpoint does not fit.

    Raises:
        CheckpointError: another architecture or layout (both are named), other frozen weights, or a file is missing or
            damaged.
    """
    _check_layout(folder, layout)
    file = _rank_file(folder, dist.get_rank())
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if state["frozen_sums"] != [_frozen_sums(chunk) for chunk in chunks]:
        raise CheckpointError(
            f"{file} holds adapters of another model: the frozen weights differ (resume with the starting weights that "
            "the run began with)"
        )
    for chunk, saved in zip(chunks, state["weights"]):
        for name, weight in _weights(chunk).items():
            weight.copy_(saved[name])
    optimizer.load_state_dict(state["optimizer"])
    _restore_random_state(state["random"])


def _rank_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank_{rank:05d}.pt"


def _check_layout(folder: str, layout: CheckpointLayout) -> None:
    file = Path(folder) / _LAYOUT_FILE
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    wanted = asdict(layout)
    differing = [key for key in wanted if saved.get(key) != wanted[key]]
    if differing:
        of_checkpoint = {key: saved.get(key) for key in differing}
        of_run = {key: wanted[key] for key in differing}
        raise CheckpointError(
            f"checkpoint {folder} does not fit this run: it has {of_checkpoint}, the run has {of_run} "
            "(resume with the model and layout of the checkpoint, or start a new run from exported weights)"
        )


def _weights(chunk: MegatronModule) -> dict[str, torch.Tensor]:
    """Return the parameters of a chunk that are not frozen, and its buffers, by name, without copying them."""
    state = chunk.state_dict(keep_vars=True)
    # Transformer Engine adds entries that are not weights.
    return {
        name: value.detach()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and "_extra_state" not in name
        and (value.requires_grad or not isinstance(value, torch.nn.Parameter))
    }


def _frozen_sums(chunk: MegatronModule) -> list[int]:
    """Return a sum of each frozen parameter, over its bits as whole numbers, which no order of summing changes."""
    words = {2: torch.int16, 4: torch.int32}
    return [
        int(parameter.detach().view(words[parameter.element_size()]).sum(dtype=torch.int64))
        for parameter in chunk.parameters()
        if not parameter.requires_grad
    ]


def _random_state() -> dict[str, Any]:  # Any: tensors and dicts of them
    streams = _random_streams().get_states()
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "streams": dict(streams)}


def _restore_random_state(state: dict[str, Any]) -> None:  # Any: as in _random_state
    torch.set_rng_state(state["torch"])
    for cuda in state["cuda"]:
        torch.cuda.set_rng_state(cuda)
    _random_streams().set_states(state["streams"])


def _random_streams() -> Any:  # Any: Megatron types it as possibly absent
    """Return Megatron's named random streams (on CPU too, whatever the name of the function)."""
    return get_cuda_rng_tracker()
