"""When a step is recorded, and what is kept of it until then.

A step is followed by handles (`StepTrace`); tokens come here only once a record is due. Two moments count: before the
update, when the weights still are those that the passes computed with, and the end of the step.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megappo.batch.refs import Ref
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import Experience, TokenField
from megappo.checkpoint.names import step_name
from megappo.config.record import RecordTrigger
from megappo.config.run import RunConfig
from megappo.controller.comparison import ParityFinding
from megappo.controller.parity_dump import Decode, parity_view, rows_with_tokens
from megappo.controller.ports import ActorClient, CriticClient
from megappo.controller.record_folder import WEIGHTS, StepRecord, WeightsReference, is_whole_record, write_record
from megappo.controller.rollouts import ScoredRollouts
from megappo.controller.schedules import StepSchedule
from megappo.errors import MegappoError, NonFiniteError, ParityError
from megappo.observability.logging import get_logger
from megappo.observability.metrics import Metrics

logger = get_logger(__name__)

_PARITY = "parity.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordSink:
    """Where records go, and what is written beside the numbers."""

    folder: Path | None = None
    """Of the records; None: nothing is written."""
    checkpoints: Path | None = None
    """Of the run's checkpoints, which a record refers to."""
    config: str = ""
    """The resolved configuration, YAML."""
    decode: Decode | None = None
    """Token ids -> text, for `parity.json`."""
    warn: Callable[[str], None] = logger.warning
    """Says one line to whoever watches the run."""


@dataclass(kw_only=True, slots=True)
class StepTrace:
    """What a step consists of, by handle."""

    step: int
    rollouts: ScoredRollouts
    schedule: StepSchedule
    current: np.ndarray
    """[B] bool, whether the actor's weights of now sampled the sequence."""
    kl_coef: float
    """Of KL in reward, as this step takes it."""
    rewards: list[Ref[TokenField]] = field(default_factory=list[Ref[TokenField]])
    experience: list[Ref[Experience]] = field(default_factory=list[Ref[Experience]])
    requests: dict[str, list[UpdateRequest]] = field(default_factory=dict[str, list[UpdateRequest]])
    """By role."""
    metrics: dict[str, Metrics] = field(default_factory=dict[str, Metrics])
    """By phase: experience, critic, actor."""
    is_updated: bool = False
    """Whether an update was begun: from then on the weights are others."""
    reasons: list[str] = field(default_factory=list[str])
    """Why the whole step is to be recorded."""
    finding: ParityFinding | None = None
    """Whose worst sequences are to be recorded."""
    checksums: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """Role -> checksums of its weights before the update."""
    exported: set[str] = field(default_factory=set[str])
    """Roles whose weights are in the record."""


class StepRecorder:
    """Writes the records of a run."""

    def __init__(self, config: RunConfig, sink: RecordSink, *, actor: ActorClient, critic: CriticClient | None) -> None:
        self._config = config
        self._sink = sink
        self._actor = actor
        self._clients: dict[str, ActorClient | CriticClient] = {"actor": actor}
        if critic is not None:
            self._clients["critic"] = critic

    def warn(self, text: str) -> None:
        """Say one line to whoever watches the run."""
        self._sink.warn(text)

    @contextmanager
    def follow(self, trace: StepTrace) -> Iterator[None]:
        """Record the step of the body if it is due, also when the body ends because of what a record is for."""
        if trace.step in self._config.record.steps:
            trace.reasons.append("record.steps")
        try:
            yield
        except (ParityError, NonFiniteError) as error:
            if isinstance(error, NonFiniteError):
                self._want(trace, RecordTrigger.non_finite, str(error))
            self.before_update(trace)
            self._write(trace)
            raise
        self._look_for_non_finite(trace, list(trace.requests))
        unknown = [role for role in self._clients if role not in trace.checksums]
        self._keep_weights(trace, [role for role in unknown if _left_alone(trace, role)])
        self._write(trace)

    def before_update(self, trace: StepTrace) -> None:
        """Keep what a record needs of the weights; no effect once an update was begun."""
        if trace.is_updated:
            return
        self._look_for_non_finite(trace, ["experience"])
        self._keep_weights(trace, list(self._clients))

    def keep_parity(self, trace: StepTrace, reasons: Sequence[str], finding: ParityFinding | None) -> str:
        """Record the step, or the worst sequences of a finding, because of limits of `rollout.parity`.

        Returns:
            Where the record will be, or why there will be none.
        """
        folder, parity = self._sink.folder, self._config.rollout.parity
        if folder is None:
            return "no record: the run has no folder"
        self._want(trace, RecordTrigger.parity, *reasons)
        if finding is None and not trace.reasons:
            return "no record: the update keeps no log-probs (algorithm.old_log_probs=recompute does)"
        if finding is not None and parity.dump > 0:
            written = len(list(folder.glob(f"step_*/{_PARITY}")))
            if finding.stops or trace.reasons or written < parity.dump_files:
                trace.finding = finding
            else:
                return f"no record: rollout.parity.dump_files={parity.dump_files} are in {folder}"
        if trace.finding is None and not trace.reasons:
            return "no record: rollout.parity.dump=0"
        return f"record: {self._final(trace)}"

    def _want(self, trace: StepTrace, trigger: RecordTrigger, *reasons: str) -> None:
        """Make a record of the whole step due, if the configuration asks for it and there is room."""
        record, folder = self._config.record, self._sink.folder
        if trigger not in record.when or folder is None:
            return
        if not trace.reasons:
            names = {step_name(step) for step in record.steps}
            made = [path for path in folder.glob("step_*") if path.name not in names and is_whole_record(path)]
            if len(made) >= record.max_records:
                return
        trace.reasons += [f"{trigger.value}: {reason}" for reason in reasons]

    def _look_for_non_finite(self, trace: StepTrace, phases: Sequence[str]) -> None:
        found = [fault for phase in phases for fault in non_finite(trace.metrics.get(phase, {}))]
        if found:
            self._want(trace, RecordTrigger.non_finite, *found)

    def _keep_weights(self, trace: StepTrace, roles: Sequence[str]) -> None:
        """Take the checksums of the weights of some roles, and the weights if they are wanted."""
        if not trace.reasons or self._sink.folder is None:
            return
        with self._no_record_on_error(trace):
            for role in roles:
                client = self._clients[role]
                trace.checksums[role] = client.weight_checksums()
                if self._config.record.weights:
                    folder = self._aside(trace) / WEIGHTS
                    folder.mkdir(parents=True, exist_ok=True)
                    client.save_hf(str((folder / role).resolve()))
                    trace.exported.add(role)

    def _write(self, trace: StepTrace) -> None:
        if self._sink.folder is None or not (trace.reasons or trace.finding):
            return
        with self._no_record_on_error(trace):
            aside = self._aside(trace)
            aside.mkdir(parents=True, exist_ok=True)
            record = self._read(trace)
            extra = dict[str, str]()
            if trace.finding is not None:
                extra[_PARITY] = parity_view(trace.finding, self._config, record.experience, self._sink.decode)
            write_record(aside, self._final(trace), record, extra=extra)

    def _read(self, trace: StepTrace) -> StepRecord:
        """Bring the numbers of the step, or of its worst sequences, here."""
        infos, rewards = trace.rollouts.sequences, trace.rollouts.rewards
        is_whole = bool(trace.reasons)
        shards = trace.schedule.shard_ids()
        if not is_whole:
            assert trace.finding is not None
            rows = rows_with_tokens(trace.finding, self._config)
            shards = [[infos[row].sequence_id for row in rows]]
        ids = [sequence_id for shard in shards for sequence_id in shard]
        experience = self._actor.read_sequences(trace.experience, ids)
        position = {info.sequence_id: index for index, info in enumerate(infos)}
        order = [position[sequence_id] for sequence_id in experience.sequence_ids.tolist()]
        return StepRecord(
            step=trace.step,
            reasons=trace.reasons
            or [f"parity: {reason}" for reason in (trace.finding.reasons if trace.finding else [])],
            is_whole=is_whole,
            sequences=[infos[index] for index in order],
            rewards=[rewards[index] for index in order],
            greedy_scores=trace.rollouts.greedy_scores,
            experience=experience,
            token_rewards=self._actor.read_sequences(trace.rewards, ids),
            current=trace.current[order],
            shards=shards,
            kl_coef=trace.kl_coef,
            requests=trace.requests if is_whole else {},
            metrics=trace.metrics,
            layouts={role: client.layout for role, client in self._clients.items()},
            weights={role: self._reference(trace, role) for role in self._clients},
            config=self._sink.config,
        )

    def _reference(self, trace: StepTrace, role: str) -> WeightsReference:
        config, checkpoint = self._config, None
        if self._sink.checkpoints is not None:
            checkpoint = self._sink.checkpoints / step_name(trace.step - 1)
        return WeightsReference(
            start=config.critic.path or config.model.path if role == "critic" else config.model.path,
            is_exported=role in trace.exported,
            checkpoint=None if checkpoint is None else str(checkpoint),
            checksums=trace.checksums.get(role),
        )

    @contextmanager
    def _no_record_on_error(self, trace: StepTrace) -> Iterator[None]:
        """A record that cannot be made ends no run; nor does it hide why a run ends."""
        try:
            yield
        except (OSError, MegappoError) as error:
            trace.reasons, trace.finding = [], None
            shutil.rmtree(self._aside(trace), ignore_errors=True)
            self._sink.warn(f"step {trace.step}: no record was written: {error}")

    def _final(self, trace: StepTrace) -> Path:
        assert self._sink.folder is not None
        return self._sink.folder / step_name(trace.step)

    def _aside(self, trace: StepTrace) -> Path:
        final = self._final(trace)
        return final.with_name(f"{final.name}.writing")


def _left_alone(trace: StepTrace, role: str) -> bool:
    """Whether the weights of a role are as before the update: there was none, or all its steps were skipped."""
    if role not in trace.requests:
        return True
    return _applied_share(trace.metrics.get(role, {}), role) == 0


def _applied_share(metrics: Metrics, role: str) -> float | None:
    """Return which part of the optimizer steps of an update were applied; None: no update, or one without steps."""
    # Their denominators: all optimizer steps of the update, and those that were applied.
    rate, norm = metrics.get(f"{role}/lr"), metrics.get(f"{role}/grad_norm")
    return None if rate is None or norm is None or rate.count == 0 else norm.count / rate.count


def non_finite(metrics: Metrics) -> list[str]:
    """Return what is not finite in some metrics, in words; of an update also that it skipped optimizer steps."""
    found = [
        f"{name}={stat.value}"
        for name, stat in metrics.items()
        if stat.value is not None and not math.isfinite(stat.value)
    ]
    for role in ("actor", "critic"):
        applied = _applied_share(metrics, role)
        if applied is not None and applied < 1:
            found.append(f"{role}: {1 - applied:.0%} of the optimizer steps were skipped")
    return found
