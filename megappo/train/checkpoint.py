"""Checkpoints of one trainer: weights, optimizer, step numbers and random states, independent of the layout.

What is refused: another architecture, role, type of numbers, optimizer or adapters. Frozen weights (those beside
adapters) are not stored: they come from the starting model, of which a checkpoint holds a sum, so that another one is
noticed. Random states, and the histories of fp8 scales, are those of the ranks of one layout; under another they start
anew.

Invariants (asserted by tests/train/test_checkpoint.py and test_checkpoint_layouts.py):
1. A trainer of the same layout that loads a checkpoint goes on bitwise as the one that saved it.
2. Under any other layout the next update is the same to rounding.
3. A checkpoint holds the state of the moment of `begin_save`, whatever is trained while it is written.
4. Nothing of a trainer is changed by a save that fails, or by a load of files that are missing or damaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.transformer.module import MegatronModule

from megappo.checkpoint.health import Checksums, model_problems
from megappo.checkpoint.manifest import FileRecord
from megappo.checkpoint.reading import readable
from megappo.device.process_group import seed_random_streams
from megappo.device.together import run_together
from megappo.errors import CheckpointError, DamagedCheckpointError, listed
from megappo.models.description import ModelDescription, read_description
from megappo.models.sharded_state import frozen_parts, sharded_weights
from megappo.observability.logging import get_logger
from megappo.train.checkpoint_files import CheckpointWrite
from megappo.train.optimizer import ModelOptimizer
from megappo.train.optimizer_state import sharded_optimizer_state
from megappo.train.random_state import random_state, restore_random_state
from megappo.train.scale_history import restore_scale_histories, scale_histories
from megappo.weights.checksums import bit_sum

logger = get_logger(__name__)

_HISTORIES = "scale_histories"
"""Their key beside the random states."""


class TrainerCheckpoints:
    """Saves and loads one trainer. All ranks that hold a part of it call every method but `is_written` together."""

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        optimizer: ModelOptimizer,
        description: ModelDescription,
        *,
        seed: int,
        keeps_histories: bool = False,
    ) -> None:
        """Args: seed: of random states that start anew. keeps_histories: whether layers have one (`scale_history`)."""
        self._chunks = chunks
        self._optimizer = optimizer
        self._description = description
        self._seed = seed
        self._keeps_histories = keeps_histories
        self._pending: CheckpointWrite | None = None
        self._frozen_sum: int | None = None

    def begin_save(self, folder: str) -> None:
        """Copy the state and begin to write it into an existing folder; returns once it is copied.

        Raises:
            CheckpointError: on every rank, when one of them cannot copy, or a save is under way.
        """
        if self._pending is not None:
            raise CheckpointError(f"{folder}: a save is under way still (finish it first: there is one at a time)")
        own = random_state() | {_HISTORIES: scale_histories(self._chunks) if self._keeps_histories else {}}
        state = self._state() | {"random": self._own_object(own)}
        common = self._optimizer.counters() | {"frozen_sum": self._sum_frozen()}
        self._pending = CheckpointWrite(Path(folder), state, common=common, description=self._description)

    def is_written(self) -> bool:
        """Whether this rank has written its file, or failed to; nothing waits."""
        return self._pending is None or self._pending.is_written()

    def wait_until_written(self) -> None:
        """Wait until this rank has written its file, or failed to; no rank waits for another."""
        if self._pending is not None:
            self._pending.wait()

    def finish_save(self) -> list[FileRecord]:
        """Wait until the folder is whole; returns the records of the files that this rank wrote, relative to it.

        Raises:
            CheckpointError: on every rank, when one could not write; names its rank, file and cause.
        """
        assert self._pending is not None, "no save is under way"
        pending, self._pending = self._pending, None
        return pending.finish()

    def load(self, folder: str) -> None:
        """Go on from a checkpoint of the same model, of any layout: `folder` is the role's, beside a `manifest.json`.

        Raises:
            CheckpointError: on every rank, and nothing is changed: another model, or (DamagedCheckpointError) a file is
                missing or damaged. Only a disk that fails after all files were read and found whole leaves a trainer
                that cannot be used.
        """
        run_together(lambda: _check_files(Path(folder)))
        saved, common = run_together(lambda: self._check_model(Path(folder)))
        self._check_frozen(folder, common)
        self._optimizer.restore_counters(common)
        state = self._state()
        differences = self._description.layout_differences(saved)
        if not differences:
            state["random"] = self._own_object(None)
        loaded: Any = run_together(lambda: dist_checkpointing.load(state, folder, validate_access_integrity=False))
        if differences:
            self._start_anew(folder, differences)
        else:
            restore_random_state(loaded["random"])
            if self._keeps_histories:
                restore_scale_histories(self._chunks, loaded["random"].get(_HISTORIES, {}))

    def load_weights(self, folder: str) -> None:
        """Take the weights of a folder that holds nothing else, as a conversion writes it; the optimizer begins anew.

        Raises:
            CheckpointError: on every rank: the folder is of another model, or cannot be read.
        """
        path = Path(folder)
        saved, common = run_together(lambda: (read_description(path), _read_common(path)))
        self._description.check_fits(replace(saved, optimizer=self._description.optimizer), path)
        self._check_frozen(folder, common)
        state: ShardedStateDict = {"weights": sharded_weights(self._chunks)}
        run_together(lambda: dist_checkpointing.load(state, folder, validate_access_integrity=False))
        self._optimizer.take_weights()

    def _state(self) -> ShardedStateDict:
        """Return the tensors of this rank, as views: what is stored, and what is filled."""
        return {
            "weights": sharded_weights(self._chunks),
            "optimizer": sharded_optimizer_state(self._optimizer, self._chunks),
        }

    def _own_object(self, state: dict[str, Any] | None) -> ShardedObject:  # Any: as in random_state
        """Return what belongs to this rank of this layout."""
        return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))

    def _check_model(self, path: Path) -> tuple[ModelDescription, dict[str, Any]]:  # Any: numbers
        """Refuse what does not fit. Returns what the checkpoint is of, and what all ranks had in common."""
        saved = read_description(path)
        self._description.check_fits(saved, path)
        return saved, _read_common(path)

    def _check_frozen(self, folder: str, common: Mapping[str, Any]) -> None:  # Any: numbers
        if common.get("frozen_sum", 0) != self._sum_frozen():
            raise CheckpointError(
                f"{folder} holds adapters of another model: the frozen weights differ (resume with the starting "
                "weights that the run began with)"
            )

    def _start_anew(self, folder: str, differences: Mapping[str, tuple[Any, Any]]) -> None:
        """Draw other numbers than at the start of the run, which would repeat; histories stay as they are, empty."""
        seed = crc32(f"{self._seed} {self._optimizer.step_number}".encode())
        seed_random_streams(seed)
        if dist.get_rank() == 0:
            changed = ", ".join(f"{key} {there} -> {here}" for key, (there, here) in differences.items())
            logger.warning(
                "%s is of another layout (%s): random states start anew from seed %d%s",
                folder,
                changed,
                seed,
                ", histories of fp8 scales empty" if self._keeps_histories else "",
            )

    def _sum_frozen(self) -> int:
        """Return a sum over all frozen weights of the model, as whole numbers, which no order or layout changes."""
        if self._frozen_sum is None:
            own = 0
            for part in frozen_parts(self._chunks):
                if part.copies.is_main(part.key, data_is_cut=False):
                    own += bit_sum(part.key, part.rows)
            sums = [0] * dist.get_world_size()
            dist.all_gather_object(sums, own)
            self._frozen_sum = sum(sums)
        return self._frozen_sum


def _read_common(path: Path) -> dict[str, Any]:  # Any: numbers
    """Return what all ranks had in common."""
    with readable(path / COMMON_STATE_FNAME):
        return dist_checkpointing.load_common_state_dict(str(path))


def _check_files(path: Path) -> None:
    """Refuse files that are not as they were written. The ranks share them."""
    share = dist.get_rank(), dist.get_world_size()
    if problems := model_problems(path, Checksums.full, share=share):
        raise DamagedCheckpointError(f"{path} is damaged: {listed(problems)}")
