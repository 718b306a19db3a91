"""Fakes behind the ports of the loop for a step of any size: they hold metadata, and tell the clock when asked.

What a port does in the driver of a real run is done here, too, and counted: dealing groups to engines (the dispatcher
of a run), reading what comes back, pickling what goes out. What engines, scoring processes and trainers do is not
counted; their answers are those of the real maths on sequences of three tokens each, since the loop sees lengths and
totals only.

Shapes: B sequences of the step.
"""

import heapq
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.control.part_clock import PartClock
from megappo.algo.experience import ExperienceTotals, RewardTotals, build_experience, compute_token_rewards
from megappo.balance.layout import RankLayout
from megappo.batch.fields import offsets_of
from megappo.batch.refs import Ref
from megappo.batch.requests import UpdateRequest
from megappo.batch.stages import Experience, RolloutBatch, TokenField
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.rollout import SamplingConfig
from megappo.controller.evaluate import Evaluation
from megappo.controller.ports import Draw, FinishedGroup, Plan, ScoredGroups, SequenceInfo, Shard
from megappo.controller.step import StepResult
from megappo.observability.metrics import Metrics, maximum, mean, merge, values
from megappo.observability.tracker import JsonlTracker
from megappo.rewards.types import Reward
from megappo.rollout.dispatch import Dispatcher, Progress, Work

DEALING = "deal groups to engines"
READING = "read what engines and rewards answer"
SENDING = "pickle what is sent"
_TOKENS = 3
"""Of every sequence as the maths sees it: one of the prompt, two sampled."""
_METRICS_OF_A_RANK = 40


@dataclass(kw_only=True, frozen=True)
class StepSize:
    """What is sampled in a step."""

    prompt_lengths: np.ndarray
    """[prompts] int64."""
    response_lengths: np.ndarray
    """[prompts, samples] int64."""
    engines: int
    at_once: int
    """Sequences that an engine runs at a time."""


@dataclass
class FakeMetadataRollout:
    """Engines that answer with lengths. They run at one token of every sequence per unit of time."""

    clock: PartClock
    size: StepSize
    answered: int = 0

    def generate(
        self, draws: Sequence[Draw], sampling: SamplingConfig, *, seed: int, wanted: int | None = None
    ) -> Iterator[FinishedGroup]:
        self.clock.end("draw")
        reports = {draw.group_id: self._report(draw, row) for row, draw in enumerate(draws)}
        self.clock.skip()
        for group_id in self._deal(draws, sampling):
            self.clock.end(DEALING)
            group = FinishedGroup(sequences=pickle.loads(reports[group_id]), samples=cast(Any, group_id))
            self.clock.end(READING)
            yield group
            self.clock.end("collect groups")

    def _report(self, draw: Draw, row: int) -> bytes:
        prompt, responses = len(draw.prompt.tokens), self.size.response_lengths[row].tolist()
        infos = [
            SequenceInfo(
                sequence_id=sequence_id,
                group_id=draw.group_id,
                prompt_tokens=prompt,
                response_tokens=tokens,
                finish_reason="stop",
                policy_version=self.answered,
                row=draw.prompt.row,
            )
            for sequence_id, tokens in zip(draw.sequence_ids, responses)
        ]
        return pickle.dumps(infos)

    def _deal(self, draws: Sequence[Draw], sampling: SamplingConfig) -> Iterator[int]:
        """Yield group ids as engines finish them, dealt out by the dispatcher of a run."""
        dispatcher = Dispatcher(slow_factor=4.0)
        for engine in range(self.size.engines):
            dispatcher.add_engine(engine, at_once=self.size.at_once)
        lengths = dict(zip((draw.group_id for draw in draws), self.size.response_lengths.tolist()))
        dispatcher.add([_work_of(draw, sampling) for draw in draws])
        now, running = 0.0, list[tuple[float, int, int]]()
        while True:
            for engine, works in dispatcher.assign(now):
                for work in works:
                    heapq.heappush(running, (now + max(lengths[work.key]), engine, work.key))
            if not running:
                return
            now, engine, key = heapq.heappop(running)
            progress = Progress(new_tokens=sum(lengths[key]), longest_new=max(lengths[key]), finished=True)
            dispatcher.returned(engine, key, progress, now)
            yield key

    def pack(self, shards: Sequence[Sequence[int]], *, forget: Sequence[int] = ()) -> list[Shard]:
        self.clock.end("schedule")
        pickle.dumps([list(ids) for ids in shards])
        self.clock.end(SENDING)
        packed = [Shard(sequence_ids=list(ids), pieces=[as_ref(short_batch(ids))]) for ids in shards]
        self.answered += 1
        self.clock.skip()
        return packed

    def take_metrics(self) -> Metrics:
        return {}

    def sleep(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_cache(self) -> None: ...


def _work_of(draw: Draw, sampling: SamplingConfig) -> Work:
    tokens = draw.prompt.tokens
    return Work(
        key=draw.group_id,
        batch=0,
        prompt=hash(tuple(tokens)),
        num_samples=len(draw.sequence_ids),
        prompt_tokens=len(tokens),
        max_new_tokens=sampling.max_new_tokens,
    )


def as_ref(value: Any) -> Any:
    """In one process a Ref is the object itself."""
    return value


def short_batch(sequence_ids: Sequence[int]) -> RolloutBatch:
    """Return sequences of three tokens."""
    count = len(sequence_ids)
    sampled = np.tile([False, True, True], count)
    return RolloutBatch(
        offsets=offsets_of([_TOKENS] * count),
        tokens=np.ones(count * _TOKENS, dtype=np.int32),
        response_mask=sampled,
        rollout_log_probs=np.where(sampled, np.float32(-1), np.float32(0)),
        sequence_ids=np.array(sequence_ids, dtype=np.int64),
        group_ids=np.zeros(count, dtype=np.int64),
    )


@dataclass
class FakeCoinReward:
    """Scores that are 0 or 1 by sequence id, from scoring processes that answer with pickled rewards."""

    clock: PartClock

    def begin(self, *, all_texts: bool = False) -> "FakeCoinScoring":
        return FakeCoinScoring(self.clock)


@dataclass
class FakeCoinScoring:
    """The groups of one generation."""

    clock: PartClock
    ids: list[list[int]] = field(default_factory=list[list[int]])

    def submit(self, group: FinishedGroup) -> None:
        self.ids.append([info.sequence_id for info in group.sequences])

    def collect(self) -> ScoredGroups:
        self.clock.end("collect groups")
        answers = [pickle.dumps({i: Reward(score=float(i * 2654435761 >> 7 & 1)) for i in ids}) for ids in self.ids]
        self.clock.skip()
        rewards: dict[int, Reward] = {}
        for answer in answers:
            rewards |= pickle.loads(answer)
        self.clock.end(READING)
        return ScoredGroups(rewards=rewards, samples={})


class FakeTotalsActor:
    """A policy whose log-probs are all -1, on any number of data-parallel ranks."""

    def __init__(self, clock: PartClock, *, data: int, algorithm: AlgorithmConfig) -> None:
        self.clock = clock
        self.layout = RankLayout(data=data)
        self._algorithm = algorithm

    def compute_log_probs(
        self, shards: Sequence[Shard], plan: Plan, *, reference: bool = False
    ) -> tuple[list[Ref[TokenField]], Metrics]:
        self.clock.end("plan the passes")
        self._send([(shard.sequence_ids, ranks) for shard, ranks in zip(shards, plan)])
        fields = [as_ref(field_of(shard)) for shard in shards]
        self.clock.skip()
        return fields, {}

    def compute_token_rewards(
        self, shards: Sequence[Shard], *, kl_coef: float, **per_shard: Sequence[Any] | None
    ) -> tuple[list[Ref[TokenField]], list[RewardTotals]]:
        self.clock.end("cut scores by shard")
        results = [
            compute_token_rewards(batch_of(shard), algorithm=self._algorithm, kl_coef=kl_coef, **at(per_shard, index))
            for index, shard in enumerate(shards)
        ]
        self.clock.skip()
        return [as_ref(rewards) for rewards, _ in results], [totals for _, totals in results]

    def build_experience(
        self, shards: Sequence[Shard], **per_shard: Sequence[Any] | None
    ) -> tuple[list[Ref[Experience]], list[ExperienceTotals]]:
        self.clock.end("advantages")
        results = [
            build_experience(batch_of(shard), algorithm=self._algorithm, **at(per_shard, index))
            for index, shard in enumerate(shards)
        ]
        self.clock.skip()
        return [as_ref(experience) for experience, _ in results], [totals for _, totals in results]

    def update(self, experience: Sequence[Ref[Experience]], requests: Sequence[UpdateRequest]) -> Metrics:
        self.clock.end("totals of the shards, update requests")
        self._send(requests)
        found = [{f"actor/metric_{i}/mean": mean(1.0, 2) for i in range(_METRICS_OF_A_RANK)} for _ in requests]
        self.clock.skip()
        merged = merge(found)
        self.clock.end("metrics")
        return merged

    def offload(self, *, keep_params: bool = False) -> None: ...

    def _send(self, arguments: object) -> None:
        pickle.dumps(arguments)
        self.clock.end(SENDING)


class FakeTotalsCritic(FakeTotalsActor):
    """Values that are all -1."""

    def compute_values(self, shards: Sequence[Shard], plan: Plan) -> tuple[list[Ref[TokenField]], Metrics]:
        return self.compute_log_probs(shards, plan)


def batch_of(shard: Shard) -> RolloutBatch:
    """Open a shard."""
    return cast(RolloutBatch, shard.pieces[0])


def field_of(shard: Shard) -> TokenField:
    """Return -1 for every sampled token."""
    batch = batch_of(shard)
    return TokenField(offsets=batch.offsets, values=batch.rollout_log_probs, sequence_ids=batch.sequence_ids)


def at(per_shard: dict[str, Sequence[Any] | None], index: int) -> dict[str, Any]:
    """Return the arguments of one shard."""
    return {name: None if values is None else values[index] for name, values in per_shard.items()}


@dataclass
class FakeWeightSync:
    """A hand-over of nothing."""

    clock: PartClock

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    def push(self, version: int) -> Metrics:
        self.clock.end("metrics")
        return {"weights/version": maximum(version)}


@dataclass
class RecordingObserver:
    """Writes the line of each step as a run does, and keeps the seconds of its parts."""

    clock: PartClock
    folder: Path
    steps: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def __post_init__(self) -> None:
        self._tracker = JsonlTracker(self.folder / "metrics.jsonl")

    def on_phase(self, text: str) -> None: ...

    def on_problem(self, text: str) -> None:
        raise AssertionError(text)

    def on_start(self, step: int, checkpoint: Path | None) -> bool:
        return True

    def on_step(self, step: int, total_steps: int, result: StepResult) -> None:
        self._tracker.log(step, values(result.metrics))
        self.clock.end("metrics")
        self.steps.append(self.clock.take())

    def on_answered(self, done: int, expected: int) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation) -> None: ...

    def on_checkpoint(self, folder: Path) -> None: ...
