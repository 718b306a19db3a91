"""Jobs of the checkpoint tests; each runs on every rank. A checkpoint is a folder with `manifest.json` and `model/`."""

import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megappo.batch.fields import select
from megappo.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from megappo.config.lora import LoraConfig
from megappo.config.model import Dtype
from megappo.config.optim import OptimConfig
from megappo.config.parallelism import ParallelismConfig
from megappo.device.backend import CPU
from megappo.errors import CheckpointError
from megappo.observability.metrics import values
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.trainer import ModelTrainer
from tests.train.batches import make_experience, request_of
from tests.train.jobs import complete_state, run_config, same, weights_now, whole_request

ROLE = "model"


def make_trainer(
    role: str,
    folder: str,
    layout: ParallelismConfig,
    optim: OptimConfig,
    dtype: Dtype = Dtype.float32,
    *,
    lora: LoraConfig | None = None,
) -> ModelTrainer:
    config = run_config(folder, layout, optim)
    config.model.dtype = dtype
    config.actor.lora = config.critic.lora = lora
    return ActorTrainer(config, backend=CPU) if role == "actor" else CriticTrainer(config, backend=CPU)


def save_whole(trainer: ModelTrainer, checkpoint: str) -> None:
    """Save, and write the manifest as the driver of a run does."""
    begin(trainer, checkpoint)
    finish(trainer, checkpoint)


def begin(trainer: ModelTrainer, checkpoint: str) -> None:
    make_folder(checkpoint)
    trainer.begin_save(str(Path(checkpoint) / ROLE))


def make_folder(checkpoint: str) -> None:
    if dist.get_rank() == 0:
        (Path(checkpoint) / ROLE).mkdir(parents=True, exist_ok=True)
    dist.barrier()


def finish(trainer: ModelTrainer, checkpoint: str) -> None:
    records = trainer.checkpoints.finish_save()
    everyone: list[list[FileRecord]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, records)
    if dist.get_rank() == 0:
        files = [replace(record, path=f"{ROLE}/{record.path}") for own in everyone for record in own]
        found = {path.relative_to(checkpoint).as_posix() for path in Path(checkpoint).rglob("*") if path.is_file()}
        assert {record.path for record in files} == found - {MANIFEST}
        text = Manifest(step=1, created="", roles=[ROLE], files=files).to_json()
        (Path(checkpoint) / MANIFEST).write_text(text)
    dist.barrier()


def load_whole(trainer: ModelTrainer, checkpoint: str) -> None:
    trainer.load(str(Path(checkpoint) / ROLE))


def stored_tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    content = dist_checkpointing.load_plain_tensors(str(Path(checkpoint) / ROLE))
    return {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}


@dataclass
class Updated:
    """One update, of all sequences, dealt over the data-parallel ranks."""

    metrics: dict[str, float]
    """On output ranks."""
    weights: dict[str, torch.Tensor]
    """That this rank exports."""
    steps: int


def update_all(trainer: ModelTrainer) -> Updated:
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    ids = make_experience().sequence_ids.tolist()[rank::size]
    experience = make_experience()
    own = select(experience, np.flatnonzero(np.isin(experience.sequence_ids, ids)))
    metrics: Any = trainer.update(own, request_of(experience, [ids[:2], ids[2:]]))  # type: ignore[attr-defined]
    return Updated(metrics=values(metrics), weights=weights_now(trainer), steps=trainer.optimizer.step_number)


def start_chain(role: str, folder: str, layout: ParallelismConfig, optim: OptimConfig, checkpoint: str) -> Updated:
    """Two updates, a checkpoint, and one more update."""
    trainer = make_trainer(role, folder, layout, optim)
    update_all(trainer)
    update_all(trainer)
    save_whole(trainer, checkpoint)
    return update_all(trainer)


def pass_on(
    role: str, folder: str, layout: ParallelismConfig, optim: OptimConfig, checkpoint: str, copy: str
) -> Updated:
    """Load a checkpoint of any layout, save it from this one, and take the update after it."""
    trainer = make_trainer(role, folder, layout, optim)
    load_whole(trainer, checkpoint)
    save_whole(trainer, copy)
    return update_all(trainer)


def differing(one: str, other: str) -> list[str]:
    """Keys whose tensors differ, in a bit or in shape, between two checkpoints."""
    first, second = stored_tensors(one), stored_tensors(other)
    return sorted(
        key
        for key in first.keys() | second.keys()
        if key not in first or key not in second or not torch.equal(first[key], second[key])
    )


def resume(
    role: str,
    folder: str,
    layout: ParallelismConfig,
    optim: OptimConfig,
    dtype: Dtype,
    lora: LoraConfig | None,
    checkpoint: str,
) -> dict[str, Any]:
    """Train, save, go on; then load into a fresh trainer and go on in the same way."""
    experience = make_experience()

    def go_on(trainer: Any) -> tuple[list[torch.Tensor], dict[str, float], torch.Tensor]:
        metrics = trainer.update(experience, whole_request())
        streams: Any = get_cuda_rng_tracker()  # Any: Megatron types it as possibly absent
        with streams.fork():
            drawn = torch.rand(3)
        return complete_state(trainer), values(metrics), torch.cat([drawn, torch.rand(3)])

    first: Any = make_trainer(role, folder, layout, optim, dtype, lora=lora)
    first.update(experience, whole_request())
    save_whole(first, checkpoint)
    expected = go_on(first)
    second = make_trainer(role, folder, layout, optim, dtype, lora=lora)
    load_whole(second, checkpoint)
    found = go_on(second)
    return {
        "same state": same(expected[0], found[0]),
        "same metrics": expected[1] == found[1],
        "same random numbers": torch.equal(expected[2], found[2]),
        "steps": second.optimizer.step_number,
    }


def save_trained(folder: str, layout: ParallelismConfig, checkpoint: str) -> None:
    """Save a trainer that has made steps."""
    trainer = make_trainer("actor", folder, layout, OptimConfig(lr=1e-2))
    update_all(trainer)
    save_whole(trainer, checkpoint)


def load_errors(
    role: str, folder: str, layout: ParallelismConfig, settings: list[tuple[OptimConfig, Dtype]], checkpoint: str
) -> list[tuple[str, bool]]:
    """Message of the error when the checkpoint is loaded, and whether the trainer is as it was before; per setting."""
    found = []
    for optim, dtype in settings:
        trainer = make_trainer(role, folder, layout, optim, dtype)
        if dtype is Dtype.float32:
            update_all(trainer)
        found.append(_error_of(trainer, partial(load_whole, trainer, checkpoint)))
    return found


def _error_of(trainer: ModelTrainer, action: Callable[[], None]) -> tuple[str, bool]:
    before = complete_state(trainer), trainer.optimizer.counters(), torch.get_rng_state()
    try:
        action()
    except CheckpointError as error:
        after = complete_state(trainer), trainer.optimizer.counters(), torch.get_rng_state()
        untouched = same(before[0], after[0]) and before[1] == after[1] and torch.equal(before[2], after[2])
        return str(error), untouched
    return "no error", False


@contextmanager
def held_writes() -> Iterator[Callable[[], None]]:
    """Keep every writing thread waiting until the given function is called, or the block ends."""
    gate, write = threading.Event(), FileSystemWriter.write_data

    def wait_and_write(self: Any, *args: Any) -> Any:
        gate.wait()
        return write(self, *args)

    FileSystemWriter.write_data = wait_and_write  # type: ignore[method-assign]
    try:
        yield gate.set
    finally:
        gate.set()
        FileSystemWriter.write_data = write  # type: ignore[method-assign]


def train_while_saving(folder: str, layout: ParallelismConfig, optim: OptimConfig, checkpoint: str) -> dict[str, Any]:
    """An update between the copy and the first byte on disk."""
    trainer = make_trainer("actor", folder, layout, optim)
    update_all(trainer)
    saved, counters = complete_state(trainer), trainer.optimizer.counters()
    with held_writes() as let_go:
        begin(trainer, checkpoint)
        update_all(trainer)
        written, (second, untouched) = (
            trainer.checkpoints.is_written(),
            _error_of(trainer, lambda: begin(trainer, checkpoint)),
        )
        let_go()
        finish(trainer, checkpoint)
    other = make_trainer("actor", folder, layout, optim)
    load_whole(other, checkpoint)
    return {
        "written before": written,
        "written after": trainer.checkpoints.is_written(),
        "second save": second,
        "second save changed nothing": untouched,
        "moved on": not same(saved, complete_state(trainer)),
        "holds what was saved": same(saved, complete_state(other)) and counters == other.optimizer.counters(),
    }


def fail_to_save(
    folder: str, layout: ParallelismConfig, optim: OptimConfig, faults: list[str], checkpoint: str
) -> dict[str, tuple[str, bool]]:
    """A save that fails in each way on the last rank; then one that succeeds, and training as if nothing had been."""
    trainer, undisturbed = (make_trainer("actor", folder, layout, optim) for _ in range(2))
    found = {}
    for fault in faults:
        target = f"{checkpoint}-{fault}"
        make_folder(target)
        found[fault] = _error_of(trainer, partial(_save_badly, trainer, target, fault))
        dist.barrier()
    update_all(undisturbed)
    update_all(trainer)
    save_whole(trainer, checkpoint)
    other = make_trainer("actor", folder, layout, optim)
    load_whole(other, checkpoint)
    states = [complete_state(each) for each in (trainer, undisturbed, other)]
    found["goes on as if nothing had been"] = ("", same(states[0], states[1]) and same(states[1], states[2]))
    return found


def _save_badly(trainer: ModelTrainer, target: str, fault: str) -> None:
    folder, rank = Path(target) / ROLE, dist.get_rank()
    is_last = rank == dist.get_world_size() - 1
    if fault == "no folder" and is_last:
        shutil.rmtree(folder)
    if fault == "disk full" and is_last:
        (folder / f"__{rank}_0.distcp").symlink_to("/dev/full")
    if fault == "disk full for what is shared" and is_last:
        (folder / "common.pt").symlink_to("/dev/full")
    dist.barrier()
    with held_writes() as let_go, _limited_files(8192 if fault == "file too large" and is_last else None):
        trainer.begin_save(str(folder))
        if fault == "folder removed meanwhile" and is_last:
            shutil.rmtree(folder)
        dist.barrier()
        let_go()
        trainer.checkpoints.finish_save()


@contextmanager
def _limited_files(num_bytes: int | None) -> Iterator[None]:
    """Let this process write no file of more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class LayerWithHistory(torch.nn.Module):
    """Keeps its history as layers of Transformer Engine do: bytes on the host; no bytes before its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.history, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = state.tolist()


def save_histories(folder: str, layout: ParallelismConfig, checkpoint: str) -> None:
    """Save a layer with a history of this rank's own, which goes on while the files are written."""
    trainer, layer = _with_history(folder, layout)
    layer.history = [7, dist.get_rank()]
    begin(trainer, checkpoint)
    layer.history = [9]
    finish(trainer, checkpoint)


def load_histories(folder: str, layout: ParallelismConfig, checkpoint: str) -> list[int]:
    """Return the history of a layer of a trainer that loads a checkpoint."""
    trainer, layer = _with_history(folder, layout)
    load_whole(trainer, checkpoint)
    return layer.history


def _with_history(folder: str, layout: ParallelismConfig) -> tuple[ModelTrainer, LayerWithHistory]:
    trainer = make_trainer("actor", folder, layout, OptimConfig(lr=1e-2))
    chunk: Any = trainer.chunks[-1]  # Any: takes any layer
    chunk.kept, chunk.unused = LayerWithHistory(), LayerWithHistory()
    trainer.checkpoints._keeps_histories = True  # what model.fp8=delayed says, which CPUs cannot have
    return trainer, chunk.kept
