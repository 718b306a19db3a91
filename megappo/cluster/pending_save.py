"""A save of one role under way, as the controller sees it."""

from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from megappo.checkpoint.manifest import FileRecord
from megappo.cluster.runtime import Call

if TYPE_CHECKING:
    from megappo.cluster.groups import TrainingGroup


class GroupSave:
    """All ranks have copied their state and write it in threads of their own (port: PendingSave)."""

    def __init__(self, group: "TrainingGroup") -> None:
        self._group = group
        self._asked: list[Call] = []
        self._is_written = False
        self._records: list[FileRecord] | None = None

    def done(self) -> bool:
        """Whether every rank has written its file, or failed to. Asks the ranks and never waits for their answers: one
        that is busy with something else answers a later call."""
        if self._is_written or self._records is not None:
            return True
        if not self._asked:
            self._asked = self._group.calls("is_written")
        refs = [call.ref for call in self._asked]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if len(ready) < len(refs):
            return False
        self._asked = []
        try:
            self._is_written = all(ray.get(refs))
        except RayError:
            self._is_written = True  # a rank died: `wait` says so
        return self._is_written

    def wait(self) -> list[FileRecord]:
        """Wait until the folder is whole; a second call returns the same records.

        Raises:
            CheckpointError: a rank could not write; names rank, file and cause.
            WorkerError: a rank died, or was not done within `cluster.call_timeout_s`.
        """
        if self._records is None:
            # First without ranks that wait for each other: the slowest disk has the whole time.
            self._group.run("wait_until_written")
            self._records = [record for records in self._group.run("finish_save") for record in records]
        return self._records
