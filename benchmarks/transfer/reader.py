"""A Ray process that batches are sent to, and the round trips of a driver to it."""

from typing import Any

import ray

from benchmarks.transfer.batches import StepBatches
from megappo.batch.stages import Experience
from megappo.cluster.runtime import Call as WorkerCall
from megappo.cluster.runtime import gather, start_ray
from megappo.cluster.workers import BatchCall, ShardCall
from megappo.config.cluster import ClusterConfig

_TIMEOUT_S = 120.0
_STORE_BYTES = 2 * 1024**3


class Reader:
    """Reads one token of what it is sent, so that everything has arrived."""

    def nothing(self) -> int:
        """Answer."""
        return 0

    def padded(self, batch: Any) -> int:  # Any: a DataProto
        """Read a padded batch."""
        return int(batch.batch["input_ids"][0, 0])

    def packed(self, batch: Experience) -> int:
        """Read a packed one."""
        return int(batch.tokens[0])

    def shards(self, call: BatchCall) -> int:
        """Fetch the shards that a call names, as a training process does."""
        return sum(int(batch.tokens[0]) for shard in call.shards for batch in ray.get(shard.pieces))


class RoundTrips:
    """Ray with one process; every method is one round trip of the driver."""

    def __init__(self, batches: StepBatches) -> None:
        self._batches = batches
        start_ray(ClusterConfig(object_store_bytes=_STORE_BYTES), num_cpus=1)
        self._reader: Any = ray.remote(Reader).options(num_cpus=1).remote()
        packed = batches.packed
        self._call = BatchCall(shards=[ShardCall(sequence_ids=packed.sequence_ids.tolist(), pieces=[ray.put(packed)])])
        self.nothing()

    def nothing(self) -> None:
        """Call without data."""
        self._wait(self._reader.nothing.remote())

    def padded(self) -> None:
        """Send the padded batch."""
        self._wait(self._reader.padded.remote(self._batches.padded))

    def packed(self) -> None:
        """Send the packed batch."""
        self._wait(self._reader.packed.remote(self._batches.packed))

    def by_reference(self) -> None:
        """Send the names of what is in the object store already."""
        self._wait(self._reader.shards.remote(self._call))

    def close(self) -> None:
        """End Ray."""
        ray.shutdown()

    def _wait(self, ref: Any) -> None:  # Any: an object reference
        gather([WorkerCall(ref=ref, worker="reader", log_paths=())], phase="read", timeout_s=_TIMEOUT_S)
