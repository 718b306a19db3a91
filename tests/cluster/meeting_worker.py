"""Training processes without a model: they meet in collectives, and one of them may stop on the way."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megappo.cluster.workers import ModelWorker
from megappo.device.collectives import count_collectives
from megappo.device.process_group import open_store
from megappo.observability.phases import phase


class MeetingWorker(ModelWorker):
    """See the module."""

    def setup(self, address: str, port: int) -> None:
        count_collectives(self._board)
        limit = timedelta(seconds=60)
        rank, size = self.spec.rank, self.spec.world_size
        store = open_store(address, port, world_size=size, is_first=rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        self._release_port()

    def meet(self, rounds: int, sleeper: int, sleep_before: int) -> float:
        """Sum numbers over all ranks so many times; rank `sleeper` sleeps before round `sleep_before`."""
        numbers = torch.ones(4)
        for number in range(rounds):
            with phase("forward", micro_batch=number):
                if (self.spec.rank, number) == (sleeper, sleep_before):
                    time.sleep(600)
                dist.all_reduce(numbers)
        return float(numbers.sum())
