"""Scoring processes: finished groups are scored beside generation."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megappo.cluster.placement import Slot
from megappo.cluster.runtime import Call, describe_process, gather
from megappo.config.run import RunConfig
from megappo.controller.ports import FinishedGroup
from megappo.observability.logging import redirect_process_output
from megappo.rewards.types import Reward, Sample


class RewardWorker:
    """Ray actor body: holds one reward function."""

    def __init__(self, config: RunConfig, log_path: Path) -> None:
        redirect_process_output(log_path)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._config = config.reward

    def ready(self) -> str:
        """Load the reward; returns where this process runs."""
        from megappo.rewards import make_reward

        self._reward = make_reward(self._config)
        return describe_process()

    def score(self, samples: list[Sample]) -> list[Reward]:
        """Score one group, in order."""
        return self._reward.score(samples)


class RewardPool:
    """The scoring processes of a run (port: RewardClient)."""

    def __init__(self, config: RunConfig, *, slots: Sequence[Slot], log_dir: Path) -> None:
        """Start one process per slot, or `reward.workers` processes without a device when there are no slots."""
        self._timeout_s = config.reward.timeout_s
        # Enough groups for the rollout log, and for the answers shown before and after.
        self._shown_groups = max(8, -(-config.trainer.num_rollout_samples // config.batching.samples_per_prompt))
        options = [slot.options() for slot in slots] or [{"num_cpus": 0}] * config.reward.workers
        self._log_paths = [log_dir / f"reward-{index}.log" for index in range(len(options))]
        self._workers: list[Any] = [
            ray.remote(RewardWorker).options(**options[index]).remote(config, path)
            for index, path in enumerate(self._log_paths)
        ]
        self._pending: list[tuple[FinishedGroup, Call]] = []
        self._next = 0

    def start(self) -> list[Call]:
        """Load the rewards; returns the calls to wait for."""
        return [self._call(index, "ready") for index in range(len(self._workers))]

    def _call(self, index: int, method: str, *args: Any) -> Call:
        ref = getattr(self._workers[index], method).remote(*args)
        return Call(ref=ref, worker=f"reward worker {index}", log_paths=(self._log_paths[index],))

    def submit(self, group: FinishedGroup) -> None:
        """Start scoring a group on the next worker."""
        self._pending.append((group, self._call(self._next, "score", group.samples)))
        self._next = (self._next + 1) % len(self._workers)

    def collect(self) -> tuple[dict[int, Reward], dict[int, Sample]]:
        """Wait for all submitted groups; see the port."""
        pending, self._pending = self._pending, []
        pending.sort(key=lambda item: item[0].sequences[0].sequence_id)
        # Calls queue at the workers, and the deadline is one call's.
        queued = -(-len(pending) // len(self._workers))
        results = gather([call for _, call in pending], phase="score", timeout_s=self._timeout_s * max(1, queued))
        rewards: dict[int, Reward] = {}
        samples: dict[int, Sample] = {}
        for position, ((group, _), scored) in enumerate(zip(pending, results)):
            for info, reward in zip(group.sequences, scored, strict=True):
                rewards[info.sequence_id] = reward
            if position < self._shown_groups:
                texts: list[Sample] = ray.get(group.samples)  # type: ignore[call-overload]  # the Ref is an ObjectRef
                samples.update({info.sequence_id: text for info, text in zip(group.sequences, texts)})
        return rewards, samples

    def stop(self) -> None:
        """End the workers."""
        for worker in self._workers:
            ray.kill(worker)
