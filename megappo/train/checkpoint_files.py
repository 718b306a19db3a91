"""The files of one save: this rank's part is copied, written by a thread and checksummed; rank 0 adds what they share.

The format is Megatron's torch_dist (`megatron.core.dist_checkpointing` loads it): `__<rank>_0.distcp` of every rank,
`.metadata` which says where in them a tensor lies, `common.pt`, `metadata.json`; and `model.json`.

Megatron writes asynchronously by forking the trainer, through a queue in a process of its own
(dist_checkpointing/strategies/filesystem_async.py:248). In a Ray worker that copies a process of some 90 threads
(gRPC, gloo, CUDA), of which some hold locks, and a child that dies is waited for without end. A thread of the trainer
writes the same files: writing and hashing leave the interpreter's lock to the training.
"""

import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megappo.checkpoint.disk import explained, flush_file, flush_folder
from megappo.checkpoint.manifest import FileRecord, record_files
from megappo.device.together import run_together
from megappo.errors import CheckpointError
from megappo.models.description import MODEL_FILE, ModelDescription

_INDEX_FILE = ".metadata"


class CheckpointWrite:
    """One save of this rank. All ranks make one together, and finish it together."""

    def __init__(
        self,
        folder: Path,
        state: ShardedStateDict,
        *,
        common: dict[str, Any],  # Any: numbers
        description: ModelDescription,
    ) -> None:
        """Copy the state to the host, agree on who stores what, and begin to write. Afterwards the state may change.

        Args:
            folder: exists, and is one for all ranks.
            state: parts of tensors and objects, as `dist_checkpointing` takes them.
            common: equal on all ranks.

        Raises:
            CheckpointError: on every rank, when one of them cannot.
        """
        self._folder = folder
        self._common = common
        self._description = description
        self._metadata: Metadata | None = None
        self._results: list[WriteResult] = []
        self._records: list[FileRecord] = []
        self._failure: Exception | None = None
        self._file = folder / f"__{dist.get_rank()}_0.distcp"
        # One thread, the one that calls it, and no copies of its own.
        self._writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
        self._planner = torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        plan = run_together(lambda: self._plan(state), then=self._decide)
        plan = replace(plan, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))
        self._thread = threading.Thread(target=self._write, args=(plan,), name=f"save {folder.name}", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Whether this rank has written its file, or failed to."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank has written its file, or failed to."""
        self._thread.join()

    def finish(self) -> list[FileRecord]:
        """Wait for all ranks and make the folder whole. Returns the records of the files that this rank wrote.

        Raises:
            CheckpointError: on every rank, with the rank and file of the first one that could not write.
        """
        self.wait()
        run_together(self._own_results, then=self._write_shared)
        return self._records

    def _plan(self, state: ShardedStateDict) -> SavePlan:
        if not self._folder.is_dir():
            raise CheckpointError(f"{self._folder} does not exist: it must be made before its files are written")
        parts, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica=True)
        _copy_to_host([part for group in parts.values() for part in group if isinstance(part, ShardedTensor)])
        stored = torch_strategy.mcore_to_pyt_state_dict(parts, is_loading=False)
        self._planner.set_up_planner(stored, is_coordinator=dist.get_rank() == 0)
        return self._planner.create_local_plan()

    def _decide(self, plans: Sequence[SavePlan]) -> None:
        """Put together where everything will lie (rank 0), which fails unless each tensor is stored once and whole."""
        _, self._metadata = self._planner.create_global_plan(list(plans))

    def _write(self, plan: SavePlan) -> None:
        try:
            with explained(f"{self._file} cannot be written"):
                self._results = self._writer.write_data(plan, self._planner).value()
                self._records = record_files(self._folder, [self._file])
                flush_folder(self._folder)
        except Exception as error:  # the end of a thread: raised on the rank when it finishes
            self._failure = error

    def _own_results(self) -> list[WriteResult]:
        if self._failure is not None:
            raise self._failure
        return self._results

    def _write_shared(self, results: Sequence[list[WriteResult]]) -> None:
        """Write what all ranks share (rank 0)."""
        assert self._metadata is not None
        with explained(f"{self._folder} cannot be completed"):
            common = io.BytesIO()  # torch, writing a file by itself, does not say why it cannot
            torch.save(self._common, common)
            (self._folder / COMMON_STATE_FNAME).write_bytes(common.getvalue())
            (self._folder / MODEL_FILE).write_text(self._description.to_json(), encoding="utf-8")
            self._writer.finish(self._metadata, list(results))
            save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
            files = [self._folder / name for name in (_INDEX_FILE, COMMON_STATE_FNAME, CONFIG_FNAME, MODEL_FILE)]
            for file in files:
                flush_file(file)
            flush_folder(self._folder)
            self._records = sorted(self._records + record_files(self._folder, files), key=lambda record: record.path)


def _copy_to_host(parts: Sequence[ShardedTensor]) -> None:
    """Put copies in host memory in the place of the tensors, page-locked where that makes the way there faster."""
    for part in parts:
        assert part.data is not None
        host = torch.empty(part.data.shape, dtype=part.data.dtype, pin_memory=part.data.is_cuda)
        part.data = host.copy_(part.data, non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
