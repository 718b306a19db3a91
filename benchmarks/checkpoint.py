"""Saving and loading one rank's model with its optimizer, against torch.distributed.checkpoint on the same tensors.

Run by `make bench NAME=checkpoint`; see benchmarks/README.md. megappo also computes a checksum of every byte, compares
it when it loads, and waits for the disk before a checkpoint gets its name.
"""

import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.harness import Case, Contender, Goal, Ratio, run_program
from benchmarks.training.model_presets import write_model_folder
from megappo.checkpoint.store import CheckpointStore
from megappo.config.parallelism import ParallelismConfig
from megappo.config.run import RunConfig
from megappo.device.backend import CPU
from megappo.device.process_group import init_distributed, init_model_parallel
from megappo.models.sharded_state import sharded_weights
from megappo.train.actor import ActorTrainer
from megappo.train.optimizer_state import sharded_optimizer_state

FOLDER = Path("runs/benchmarks/checkpoint")
_STEP = 1
_ACTOR = "actor"


@dataclass(kw_only=True, frozen=True)
class Sizes:
    """Size of the model (Llama's architecture, fp32): 206 MB, and twice as much of Adam's state."""

    num_hidden_layers: int = 4
    hidden_size: int = 1024
    intermediate_size: int = 2688
    vocab_size: int = 4096

    def config(self) -> dict[str, object]:
        """Return its config.json."""
        heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
        return {"model_type": "llama", "rms_norm_eps": 1e-6, "max_position_embeddings": 128, **heads, **asdict(self)}


class Saved:
    """A trainer with a step of state, its checkpoint, and the same tensors as torch.distributed.checkpoint has them."""

    def __init__(self, sizes: Sizes) -> None:
        self._trainer = make_trainer(sizes)
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(dir=FOLDER)
        self._store = CheckpointStore(Path(self._folder.name) / "checkpoints")
        self._peer = Path(self._folder.name) / "peer"
        trainer = self._trainer
        state = sharded_weights(trainer.chunks) | sharded_optimizer_state(trainer.optimizer, trainer.chunks)
        self._tensors = {key: part.data for key, part in state.items()}
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def save(self) -> tuple[float, float]:
        """Make a checkpoint; returns the seconds in which training stood still, and those until it was whole."""
        start = time.perf_counter()
        folder = self._store.begin(_STEP) / _ACTOR
        folder.mkdir()
        self._trainer.begin_save(str(folder))
        copied = time.perf_counter()
        records = self._trainer.checkpoints.finish_save()
        self._store.commit(_STEP, [replace(record, path=f"{_ACTOR}/{record.path}") for record in records])
        return copied - start, time.perf_counter() - start

    def load(self) -> None:
        """Load the checkpoint."""
        self._trainer.load(str(self._store.directory / f"step_{_STEP:06d}" / _ACTOR))

    def peer_save(self) -> None:
        """Save the same tensors with torch.distributed.checkpoint."""
        shutil.rmtree(self._peer, ignore_errors=True)
        save(self._tensors, checkpoint_id=self._peer)

    def peer_load(self) -> None:
        """Load them in place."""
        load(self._tensors, checkpoint_id=self._peer)

    def changed_by_loading(self) -> float:
        """Return the largest difference that saving, wiping and loading leaves in any tensor."""
        before = {key: tensor.clone() for key, tensor in self._tensors.items()}
        for tensor in self._tensors.values():
            tensor.zero_()
        self.load()
        return max(float((tensor - before[key]).abs().max()) for key, tensor in self._tensors.items())


def make_trainer(sizes: Sizes) -> ActorTrainer:
    """Return the actor of a world of one rank, with random weights and the optimizer state of one step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if not torch.distributed.is_initialized():
        init_distributed(rank=0, world_size=1, address="127.0.0.1", port=port, backend=CPU, timeout_s=60.0)
        init_model_parallel(ParallelismConfig(), seed=0)
    config = RunConfig()
    config.model.random_weights = True
    config.model.path = str(write_model_folder(sizes.config(), FOLDER / "model"))
    trainer = ActorTrainer(config, backend=CPU)
    trainer.optimizer.restore_counters({"step_number": 1, "skipped_steps": 0, "skipped_in_a_row": 0})
    for owned in trainer.optimizer.owned():
        for tensor in owned.tensors.values():
            tensor.normal_()
    return trainer


def make_save(quick: bool) -> Case:
    """Writing, and how long training stands still for it."""
    sizes = _sizes(quick)
    saved = Saved(sizes)

    def figures(_: Mapping[str, object]) -> dict[str, float]:
        blocked, whole = (sorted(times)[1] for times in zip(*(saved.save() for _ in range(3)), strict=True))
        gigabytes = saved.num_bytes / 1e9
        return {
            "blocked by an asynchronous save, wall s per GB": blocked / gigabytes,
            "whole save, wall s per GB": whole / gigabytes,
            "blocked share of the save": blocked / whole,
            "largest difference after loading": saved.changed_by_loading(),
            "GB": gigabytes,
        }

    return Case(
        key="save",
        question="one checkpoint of one rank, checksums and flushes included",
        sizes=asdict(sizes) | {"dtype": "float32", "optimizer": "adam"},
        contenders=[
            Contender(name="torch.distributed.checkpoint", run=saved.peer_save),
            Contender(name="megappo", run=saved.save),
        ],
        ratios=[Ratio(name="megappo, times DCP", numerator="megappo", denominator="torch.distributed.checkpoint")],
        goals=[
            Goal(figure="megappo, times DCP", at_most=2.0),
            Goal(figure="blocked share of the save", at_most=0.3),
            Goal(figure="largest difference after loading", at_most=0.0),
        ],
        quantities=figures,
    )


def make_load(quick: bool) -> Case:
    """Reading into a trainer that is there."""
    sizes = _sizes(quick)
    saved = Saved(sizes)
    saved.save()
    saved.peer_save()

    def figures(_: Mapping[str, object]) -> dict[str, float]:
        start = time.perf_counter()
        saved.load()
        gigabytes = saved.num_bytes / 1e9
        return {"load, wall s per GB": (time.perf_counter() - start) / gigabytes, "GB": gigabytes}

    return Case(
        key="load",
        question="the same checkpoint into the trainer, checksums compared",
        sizes=asdict(sizes) | {"dtype": "float32", "optimizer": "adam"},
        contenders=[
            Contender(name="torch.distributed.checkpoint", run=saved.peer_load),
            Contender(name="megappo", run=saved.load),
        ],
        ratios=[Ratio(name="megappo, times DCP", numerator="megappo", denominator="torch.distributed.checkpoint")],
        goals=[Goal(figure="megappo, times DCP", at_most=2.0)],
        quantities=figures,
    )


def _sizes(quick: bool) -> Sizes:
    return Sizes(num_hidden_layers=2, hidden_size=256, intermediate_size=704, vocab_size=512) if quick else Sizes()


def main() -> None:
    """Measure the chosen cases."""
    run_program("checkpoint", {"save": make_save, "load": make_load}, packages=["torch", "megatron-core"])


if __name__ == "__main__":
    main()
