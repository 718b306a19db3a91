"""What one process of a replay does: the real trainer on the recorded sequences.

All processes get the same job; results come back from those that hold them.
"""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megappo.balance.layout import RankLayout
from megappo.balance.workload import workload_of_model
from megappo.batch.fields import select
from megappo.batch.stages import RolloutBatch
from megappo.config.algorithm import KLConfig
from megappo.controller.record_folder import StepRecord, read_record
from megappo.device.backend import Backend, resolve_backend
from megappo.models.architecture import read_config
from megappo.observability.metrics import Metrics
from megappo.replay.jobs import RankJob, RankResult
from megappo.replay.plans import RecordedWork
from megappo.replay.weights import compare_with_record
from megappo.train.actor import ActorTrainer
from megappo.train.critic import CriticTrainer
from megappo.train.weight_facts import WeightFacts, weight_facts


def replay_on_rank(job: RankJob) -> RankResult:
    """Do this process's part of a job; the model-parallel groups are there.

    Raises:
        CheckpointError: on every process, when the weights are not those of the record.
    """
    record = read_record(job.record)
    backend = resolve_backend(job.config.cluster.device)
    trainer = _build(job, job.weights.model, backend, with_reference=job.updates)
    if job.weights.checkpoint is not None:
        if job.weights.has_optimizer_state:
            trainer.load(job.weights.checkpoint)
        else:
            trainer.checkpoints.load_weights(job.weights.checkpoint)
    facts = _gathered(weight_facts(trainer.chunks))
    result = RankResult(
        checksums={name: found.checksum for name, found in facts.items()},
        non_finite={name: found.non_finite for name, found in facts.items() if found.non_finite},
    )
    recorded = record.weights[job.role].checksums
    if job.checks_weights and recorded is not None:
        where = job.weights.describe()
        compare_with_record(result.checksums, recorded, result.non_finite, role=job.role, where=where)
    work = RecordedWork(
        record,
        job.layout,
        batching=job.config.batching,
        workload=workload_of_model(read_config(Path(job.weights.model))),
    )
    if job.updates:
        result.metrics = _update(job, trainer, record, work)
        return result
    _run_passes(job, trainer, record, work, result)
    if job.reference is not None:
        del trainer  # two models need not fit
        reference = _build(job, job.reference, backend, with_reference=False)
        assert isinstance(reference, ActorTrainer)
        fields, _ = reference.compute_log_probs(*_mine(job, record, work))
        if fields is not None:
            result.fields["ref_log_probs"] = fields.log_probs
    return result


def _build(job: RankJob, folder: str, backend: Backend, *, with_reference: bool) -> ActorTrainer | CriticTrainer:
    """Build the role's model from a folder; the reference policy is a second copy, which only an update needs."""
    config = job.config
    if job.role == "critic":
        return CriticTrainer(replace(config, critic=replace(config.critic, path=folder)), backend=backend)
    if not with_reference:
        config = replace(config, algorithm=replace(config.algorithm, kl=KLConfig()))
    return ActorTrainer(replace(config, model=replace(config.model, path=folder)), backend=backend)


def _run_passes(
    job: RankJob, trainer: ActorTrainer | CriticTrainer, record: StepRecord, work: RecordedWork, result: RankResult
) -> None:
    batch, micro_batches = _mine(job, record, work)
    if isinstance(trainer, CriticTrainer):
        values, _ = trainer.compute_values(batch, micro_batches)
        if values is not None:
            result.fields["values"] = values
        return
    fields, result.metrics = trainer.compute_log_probs(batch, micro_batches)
    if fields is not None:
        result.fields["old_log_probs"] = fields.log_probs


def _update(job: RankJob, trainer: ActorTrainer | CriticTrainer, record: StepRecord, work: RecordedWork) -> Metrics:
    rank = _data_rank(job.layout)
    request = work.requests(job.role)[rank]
    if job.first_step_only:
        request = replace(request, mini_batches=request.mini_batches[:1], epochs=1)
    return trainer.update(select(record.experience, work.parts[rank]), request)


def _mine(job: RankJob, record: StepRecord, work: RecordedWork) -> tuple[RolloutBatch, list[list[int]]]:
    """Return the sequences of this data-parallel rank, and their micro-batches."""
    rank = _data_rank(job.layout)
    part = select(record.experience, work.parts[rank])
    batch = RolloutBatch(
        offsets=part.offsets,
        tokens=part.tokens,
        response_mask=part.response_mask,
        rollout_log_probs=part.rollout_log_probs,
        sequence_ids=part.sequence_ids,
        group_ids=part.group_ids,
    )
    return batch, work.pass_plan()[rank]


def _data_rank(layout: RankLayout) -> int:
    """Return the data-parallel rank of this process (Megatron's order: tensor, context, data, pipeline)."""
    return dist.get_rank() // (layout.tensor * layout.context) % layout.data


def _gathered(facts: dict[str, WeightFacts]) -> dict[str, WeightFacts]:
    parts: list[dict[str, WeightFacts]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, facts)
    return {name: found for part in parts for name, found in part.items()}
