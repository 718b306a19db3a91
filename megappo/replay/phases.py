"""The phases that can be replayed, and what comes out of each against the record."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megappo.batch.fields import concat
from megappo.batch.stages import TokenField
from megappo.config.run import RunConfig
from megappo.controller.order import needs_old_log_probs
from megappo.controller.record_folder import StepRecord, read_record
from megappo.errors import RecordError
from megappo.observability.metrics import Metrics, merge
from megappo.replay.advantages import rebuild_experience
from megappo.replay.differences import (
    Decode,
    FieldDifference,
    NumberDifference,
    compare_field,
    compare_metrics,
    compare_number,
)
from megappo.replay.jobs import RankJob, RankResult
from megappo.replay.settings import ReplaySettings, refuse_unfit
from megappo.replay.weights import Origin, RoleWeights, find_weights, option_of

Launch = Callable[[RankJob], list[RankResult]]
"""Does a job on all ranks of its layout; returns their results."""

_FIRST_STEP = ("first_step/loss", "first_step/grad_norm")


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayRequest:
    """What is to be replayed, and how."""

    folder: Path
    """Of the record."""
    settings: ReplaySettings
    given: dict[str, Path]
    """Role -> weights that were named on the command line."""
    start: Path | None
    """Hugging Face folder of the weights that the run began with; None: where the record says."""
    checks_weights: bool
    tolerance: float
    decode: Decode | None
    launch: Launch


@dataclass(kw_only=True, slots=True)
class ReplayReport:
    """What came out."""

    fields: list[FieldDifference] = field(default_factory=list[FieldDifference])
    numbers: list[NumberDifference] = field(default_factory=list[NumberDifference])
    weights: dict[str, str] = field(default_factory=dict[str, str])
    """Role -> which weights."""
    non_finite_weights: dict[str, int] = field(default_factory=dict[str, int])
    """Tensor -> how many of its numbers are not finite."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def agrees(self) -> bool:
        """Whether everything that decides is within the tolerance."""
        return all(found.agrees for found in self.fields if found.is_judged) and all(n.agrees for n in self.numbers)


def replay_log_probs(request: ReplayRequest) -> ReplayReport:
    """Old and reference log-probs of the actor, and the critic's values where the run had one."""
    record, report = read_record(request.folder), ReplayReport()
    config, experience = request.settings.config, record.experience
    start = _start(request, record, "actor")
    wants_reference = experience.ref_log_probs is not None
    if wants_reference and not (start / "config.json").is_file():
        report.notes.append(f"reference log-probs are left out: {start} is not here (give it as --start DIR)")
        wants_reference = False
    job = _job(request, record, "actor", reference=str(start) if wants_reference else None)
    results = _run(request, job, report)
    found = _joined(results, "old_log_probs")
    if needs_old_log_probs(config) and experience.old_log_probs is not None:
        report.fields.append(_compare(request, record, "old_log_probs", experience.old_log_probs, found))
    else:
        report.notes.append(
            "the run computed no log-probs before the update: there is nothing of its trainer to compare"
        )
    current = record.current & (experience.lengths > 0)
    engine = _compare(request, record, "rollout_log_probs", experience.rollout_log_probs, found, sequences=current)
    report.fields.append(engine)
    if wants_reference:
        assert experience.ref_log_probs is not None
        reference = _joined(results, "ref_log_probs")
        report.fields.append(_compare(request, record, "ref_log_probs", experience.ref_log_probs, reference))
    if record.is_whole:
        report.numbers += _compare_metrics(request, record, "experience", merge(result.metrics for result in results))
    if experience.values is not None:
        _replay_values(request, record, report, experience.values)
    return report


def _replay_values(request: ReplayRequest, record: StepRecord, report: ReplayReport, recorded: np.ndarray) -> None:
    try:
        job = _job(request, record, "critic")
    except RecordError as error:
        report.notes.append(f"values are left out: {error}")
        return
    results = _run(request, job, report)
    report.fields.append(_compare(request, record, "values", recorded, _joined(results, "values")))


def replay_advantages(request: ReplayRequest) -> ReplayReport:
    """Token rewards, advantages, returns and correction from what is recorded of the passes; no weights."""
    record, report = _whole_record(request, "advantages"), ReplayReport()
    experience = record.experience
    rebuilt = rebuild_experience(record, request.settings.config.algorithm)
    compared: list[tuple[str, np.ndarray | None, np.ndarray | None]] = [
        ("token_rewards", record.token_rewards.values, rebuilt.token_rewards.values),
        ("loss_mask", experience.loss_mask, rebuilt.experience.loss_mask),
        *(
            (name, getattr(experience, name), getattr(rebuilt.experience, name))
            for name in ("advantages", "returns", "correction_weights")
        ),
    ]
    for name, before, after in compared:
        if before is not None and after is not None:
            values = TokenField(
                offsets=rebuilt.experience.offsets,
                values=after.astype(np.float32),
                sequence_ids=rebuilt.experience.sequence_ids,
            )
            report.fields.append(_compare(request, record, name, before, values))
    report.numbers = _compare_metrics(request, record, "experience", rebuilt.metrics)
    requests = record.requests.get("actor", [])
    if requests and requests[0].whitening is not None and rebuilt.whitening is not None:
        for name in ("mean", "inverse_std"):
            before, after = getattr(requests[0].whitening, name), getattr(rebuilt.whitening, name)
            report.numbers.append(compare_number(f"whitening/{name}", before, after, tolerance=request.tolerance))
    return report


def replay_update(request: ReplayRequest) -> ReplayReport:
    """Loss, gradient norm and metrics of the update of every role whose weights are here."""
    record, report = _whole_record(request, "update"), ReplayReport()
    if not record.requests:
        raise RecordError(f"{request.folder}: step {record.step} ended before an update was asked for")
    for role in record.requests:
        try:
            job = _job(request, record, role, updates=True)
        except RecordError as error:
            if role == "actor":
                raise
            report.notes.append(f"the {role}'s update is left out: {error}")
            continue
        _replay_update_of(request, record, report, job)
    return report


def _replay_update_of(request: ReplayRequest, record: StepRecord, report: ReplayReport, job: RankJob) -> None:
    role, told = job.role, record.requests[job.role][0]
    steps = len(told.mini_batches) * told.epochs
    if not steps:
        report.notes.append(f"the {role}'s update had no loss tokens: no optimizer step was made")
        return
    metrics = merge(result.metrics for result in _run(request, job, report))
    names = None
    if job.first_step_only and steps > 1:
        names = [f"{role}/{name}" for name in _FIRST_STEP]
        report.notes.append(
            f"{role}: the first of {steps} optimizer steps, which needs no optimizer state; for the others give the "
            f"checkpoint of step {record.step - 1} as --{option_of(role)}"
        )
    elif job.first_step_only:
        # What tells of the optimizer itself.
        names = [name for name in metrics if name not in (f"{role}/lr", f"{role}/skipped_steps")]
    report.numbers += _compare_metrics(request, record, role, metrics, names=names)


PHASES = {"log_probs": replay_log_probs, "advantages": replay_advantages, "update": replay_update}


def _job(
    request: ReplayRequest, record: StepRecord, role: str, *, reference: str | None = None, updates: bool = False
) -> RankJob:
    """Return the job of a role, once its models can be built."""
    config = request.settings.config
    weights = find_weights(
        record, request.folder, role, given=request.given.get(role), start=_start(request, record, role)
    )
    config = _with_model(config, role, weights, updates=updates)
    refuse_unfit(config)
    return RankJob(
        record=request.folder,
        role=role,
        config=config,
        layout=request.settings.layout(role),
        weights=weights,
        # In another precision other numbers are right.
        checks_weights=request.checks_weights and not request.settings.changes_precision,
        reference=reference,
        updates=updates,
        first_step_only=updates and not weights.has_optimizer_state,
    )


def _with_model(config: RunConfig, role: str, weights: RoleWeights, *, updates: bool) -> RunConfig:
    """Return the configuration with the model of one role, and of no other."""
    training = config.actor if role == "actor" else config.critic
    lora = training.lora
    if lora is not None and weights.origin is Origin.export:
        if updates:
            raise RecordError(
                f"{weights.model} holds the sums of weights and adapters ({role}.lora), and an update needs the "
                f"adapters (give a checkpoint of the step before as --{option_of(role)})"
            )
        lora = None
    model = replace(config.model, path=weights.model)
    if role == "actor":
        critic = replace(config.critic, path=None, lora=None)
        return replace(config, model=model, actor=replace(config.actor, lora=lora), critic=critic)
    critic = replace(config.critic, path=weights.model, lora=lora)
    return replace(config, model=model, actor=replace(config.actor, lora=None), critic=critic)


def _start(request: ReplayRequest, record: StepRecord, role: str) -> Path:
    """Return the folder of the weights that the run began with."""
    return request.start or Path(record.weights[role].start)


def _whole_record(request: ReplayRequest, phase: str) -> StepRecord:
    record = read_record(request.folder)
    if not record.is_whole:
        raise RecordError(
            f"{request.folder} holds {len(record.sequences)} sequences of its step, the worst of rollout.parity: "
            f"--phase {phase} needs all of them (record.when=[parity] records them; --phase log_probs works)"
        )
    return record


def _run(request: ReplayRequest, job: RankJob, report: ReplayReport) -> list[RankResult]:
    results = request.launch(job)
    report.weights[job.role] = job.weights.describe()
    report.non_finite_weights |= {f"{job.role} {name}": count for name, count in results[0].non_finite.items()}
    return results


def _joined(results: list[RankResult], name: str) -> TokenField:
    """Return a quantity of all data-parallel ranks."""
    return concat([result.fields[name] for result in results if name in result.fields])


def _compare(
    request: ReplayRequest,
    record: StepRecord,
    name: str,
    recorded: np.ndarray,
    replayed: TokenField,
    *,
    sequences: np.ndarray | None = None,
) -> FieldDifference:
    return compare_field(
        record,
        name,
        recorded,
        replayed,
        tolerance=request.tolerance,
        decode=request.decode,
        sequences=sequences,
    )


def _compare_metrics(
    request: ReplayRequest, record: StepRecord, phase: str, metrics: Metrics, *, names: Collection[str] | None = None
) -> list[NumberDifference]:
    recorded = record.metrics.get(phase, {})
    return compare_metrics(recorded, metrics, tolerance=request.tolerance, names=names)
