"""A loop of one process around the real trainers, which records its steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from megappo.algo.advantages import needs_values
from megappo.algo.kl import KLCoefficient
from megappo.balance.workload import workload_of_model
from megappo.batch.fields import concat
from megappo.batch.refs import Ref
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from megappo.config.run import RunConfig
from megappo.config.store import resolved_yaml
from megappo.controller.ports import Plan, Shard
from megappo.controller.record import RecordSink
from megappo.controller.step import Components, learn
from megappo.data.sampler import PromptSampler
from megappo.device.backend import CPU
from megappo.models.architecture import read_config
from megappo.observability.metrics import Metrics
from megappo.observability.timing import PhaseTimer
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from tests.controller.test_loop import PROMPTS, THROUGHPUT, share_of_threes
from tests.fakes.bigram_rollout import FakeRollout, as_ref
from tests.fakes.one_process import FakeActor, FakeCritic, FakeReward, FakeWeightSync, open_shard
from tests.train.batches import VOCAB


class TrainedActor(FakeActor):
    """The actor's port over one real trainer; the experience maths beside it is the fake's, which is the product's."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(torch.zeros(1, 1), data=1, lr=0.0, algorithm=config.algorithm)
        self.trainer = ActorTrainer(config, backend=CPU)

    def compute_log_probs(
        self, shards: Sequence[Shard], plan: Plan, *, reference: bool = False
    ) -> tuple[list[Ref[TokenField]], Metrics]:
        (shard,), (micro_batches,) = shards, plan
        fields, metrics = self.trainer.compute_log_probs(open_shard(shard), micro_batches, reference=reference)
        assert fields is not None
        return [as_ref(fields.log_probs)], metrics

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        return self.trainer.update(concat(cast(list[Experience], experience)), requests[0])

    def weight_checksums(self) -> dict[str, str]:
        return self.trainer.weight_checksums()

    def save_hf(self, folder: str) -> None:
        self.trainer.save_hf(folder)


class TrainedCritic(FakeCritic):
    """The critic's port over one real trainer."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(torch.zeros(1), data=1, lr=0.0, algorithm=config.algorithm)
        self.trainer = CriticTrainer(config, backend=CPU)

    def compute_values(self, shards: Sequence[Shard], plan: Plan) -> tuple[list[Ref[TokenField]], Metrics]:
        values, metrics = self.trainer.compute_values(cast(RolloutBatch, open_shard(shards[0])), plan[0])
        return [as_ref(values)], metrics

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        return self.trainer.update(concat(cast(list[Experience], experience)), requests[0])

    def weight_checksums(self) -> dict[str, str]:
        return self.trainer.weight_checksums()

    def save_hf(self, folder: str) -> None:
        self.trainer.save_hf(folder)


def record_steps(config: RunConfig, run: Path, *, steps: int, checkpoints: Sequence[int] = ()) -> list[str]:
    """Train on answers of a bigram model, whatever the policy; returns what the loop was told.

    Args:
        run: takes `records/` and, after the given steps, `checkpoints/`.
    """
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    actor = TrainedActor(config)
    rollout = FakeRollout(table=table, version=0)
    said: list[str] = []
    folder = run / "checkpoints"
    parts = Components(
        config=config,
        sampler=PromptSampler(PROMPTS, batch_size=config.batching.prompts_per_step, seed=0, shuffle=True),
        rollout=rollout,
        reward=FakeReward(share_of_threes),
        actor=actor,
        critic=TrainedCritic(config) if needs_values(config.algorithm) else None,
        weight_sync=FakeWeightSync(actor=actor, rollout=rollout),
        kl_coefficient=KLCoefficient(config.algorithm.kl.in_reward),
        workload=workload_of_model(read_config(Path(config.model.path))),
        throughput=THROUGHPUT,
        records=RecordSink(folder=run / "records", checkpoints=folder, config=resolved_yaml(config), warn=said.append),
    )
    for step in range(1, steps + 1):
        timer = PhaseTimer()
        rollout.version = step - 1
        learn(parts, parts.step_sampler.sample(step, timer), step=step, timer=timer)
        if step in checkpoints:
            _save(parts, folder / f"step_{step:06d}")
    return said


def _save(parts: Components, folder: Path) -> None:
    """Write a checkpoint as the driver of a run does."""
    clients: dict[str, Any] = {"actor": parts.actor, "critic": parts.critic}  # Any: the ports above, with trainers
    files: list[FileRecord] = []
    roles = [role for role, client in clients.items() if client is not None]
    for role in roles:
        (folder / role).mkdir(parents=True)
        clients[role].trainer.begin_save(str(folder / role))
        written = clients[role].trainer.checkpoints.finish_save()
        files += [replace(record, path=f"{role}/{record.path}") for record in written]
    (folder / MANIFEST).write_text(Manifest(step=1, created="", roles=roles, files=files).to_json())
