"""Scores samples in a process of its own, and answers for every one of them, whatever reward functions do.

Invariants (asserted by tests/rewards/test_scorer.py):
1. Every sample gets exactly one outcome: what the reward returned for it, or a failure of its own.
2. A sample that hangs or ends the process costs no other one its score: the process is killed, started anew, and those
   that were being scored beside it are scored again. Where it cannot be told which of several was to blame, each is
   scored alone.
3. A batch that fails is scored again sample by sample.
4. Nothing waits longer for a call than `timeout_s`, and a second for the process to notice it by itself.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megappo.config.reward import RewardTerms, terms_of
from megappo.errors import MegappoError
from megappo.observability.logging import get_logger
from megappo.observability.phases import phase
from megappo.rewards.calling import Outcome
from megappo.rewards.composed import join_terms
from megappo.rewards.process_handle import ScoringProcess, start_process
from megappo.rewards.scoring_process import Answer, ProcessSettings, Request, label_of, timed_out
from megappo.rewards.types import Failure, FailureKind, Sample

logger = get_logger(__name__)

_GRACE_S = 1.0
"""A process that can tell by itself which call takes too long does so in this time after the limit."""
_MAY_PASS = (FailureKind.raised, FailureKind.timed_out, FailureKind.died)
"""Failures that a second try may not have."""
_OF_A_BATCH = (*_MAY_PASS, FailureKind.wrong_length, FailureKind.wrong_type, FailureKind.none)
"""Failures that may be those of another sample of the batch."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerSettings:
    """Limits of a scoring process, as in `reward`."""

    sections: Mapping[str, RewardTerms]
    """Rewards by name."""
    concurrency: int
    timeout_s: float
    retries: int
    start_timeout_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoredSamples:
    """What became of the samples of one call, in order, and what else happened since the last call was answered."""

    outcomes: Sequence[Outcome]
    """Of failures, only the first of its kind has `details`."""
    busy_s: float
    """Seconds with something to score."""
    retries: int
    restarts: int


@dataclass(slots=True, eq=False)
class _Job:
    """One call of `score`."""

    samples: Sequence[Sample]
    done: asyncio.Future[None]
    calls: int = 0
    """Outcomes that it waits for: of each term, for each sample."""
    found: dict[tuple[int, str], Outcome] = field(default_factory=dict[tuple[int, str], Outcome])
    """By position of the sample, and term."""


@dataclass(slots=True, eq=False)
class _Unit:
    """Samples that are scored in one call of the reward."""

    job: _Job
    term: str
    positions: list[int]
    tries: int = 0
    alone: bool = False
    """Score nothing beside it: it may be what ended the process."""

    @property
    def samples(self) -> list[Sample]:
        return [self.job.samples[position] for position in self.positions]


@dataclass(slots=True, eq=False)
class _Sent:
    """A unit that is being scored."""

    unit: _Unit
    late: asyncio.TimerHandle
    told: phase
    """What this process does, for reports of hangs: it is entered, and left with the answer."""

    def end(self) -> _Unit:
        """Wait for it no longer."""
        self.late.cancel()
        self.told.__exit__(None, None, None)
        return self.unit


class Scorer:
    """One scoring process at a time. All methods run in one event loop."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._process: ScoringProcess | None = None
        """None while there is none that takes requests."""
        self._batched: frozenset[tuple[str, str]] = frozenset()
        """Rewards and their terms that score several samples in one call."""
        self._weights = {
            reward: {name: term.weight for name, term in terms_of(section).items()}
            for reward, section in settings.sections.items()
        }
        """Reward -> its terms -> their weights."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: deque[_Unit] = deque()
        self._suspects: deque[_Unit] = deque()
        """Units that are scored alone."""
        self._in_flight: dict[int, _Sent] = {}
        self._jobs: set[_Job] = set()
        self._next_number = 0
        self._error: MegappoError | None = None
        """Why nothing can be scored any more."""
        self._told: set[str] = set()
        self._busy_since: float | None = None
        self._busy_s, self._retries, self._restarts = 0.0, 0, 0

    async def start(self) -> None:
        """Start the process and make the rewards.

        Raises:
            DataError: a reward refuses its parameters.
            WorkerError: the process does not start.
        """
        self._process = await self._start_process()

    async def score(self, samples: Sequence[Sample]) -> ScoredSamples:
        """Score samples; several calls may wait at the same time.

        Raises:
            MegappoError: as `start`, when the process had to be started anew.
        """
        if self._error is not None:
            raise self._error
        job = _Job(samples, asyncio.get_running_loop().create_future())
        units = self._units(job)
        if units:
            self._jobs.add(job)
            self._queue.extend(units)
            self._busy_since = time.monotonic() if self._busy_since is None else self._busy_since
            self._send_what_fits()
            await job.done
        return self._report([self._told_once(self._joined(job, position)) for position in range(len(samples))])

    async def close(self) -> None:
        """End the process."""
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    def _units(self, job: _Job) -> list[_Unit]:
        by_reward: dict[str, list[int]] = {}
        for position, sample in enumerate(job.samples):
            by_reward.setdefault(sample.reward, []).append(position)
        units: list[_Unit] = []
        for reward, positions in by_reward.items():
            for term in self._weights.get(reward, {}):
                alone = [[position] for position in positions]
                batches = [positions] if (reward, term) in self._batched else alone
                units += [_Unit(job, term, batch) for batch in batches]
        job.calls = sum(len(unit.positions) for unit in units)
        return units

    def _joined(self, job: _Job, position: int) -> Outcome:
        reward = job.samples[position].reward
        if reward in self._weights:
            weights = self._weights[reward]
            return join_terms({term: job.found[position, term] for term in weights}, weights)
        text = f"reward: the run has none for {reward!r} (it has {', '.join(map(repr, self._weights))})"
        return Failure(kind=FailureKind.raised, message=text, refused=True)

    def _told_once(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.key in self._told:
            return replace(outcome, details="")
        self._told.add(outcome.key)
        logger.error("first failure of the kind %s: %s\n%s", outcome.key, outcome.message, outcome.details)
        return outcome

    def _report(self, outcomes: Sequence[Outcome]) -> ScoredSamples:
        now = time.monotonic()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = now if self._jobs else None
        found = ScoredSamples(outcomes=outcomes, busy_s=self._busy_s, retries=self._retries, restarts=self._restarts)
        self._busy_s, self._retries, self._restarts = 0.0, 0, 0
        return found

    # Requests and answers.

    def _send_what_fits(self) -> None:
        while self._process is not None and (unit := self._next_unit()) is not None:
            number, self._next_number = self._next_number, self._next_number + 1
            samples = unit.samples
            self._process.send(Request(number=number, reward=samples[0].reward, term=unit.term, samples=samples))
            late = asyncio.get_running_loop().call_later(
                self._settings.timeout_s + _GRACE_S, self._out_of_time, self._process, number
            )
            told = self._phase_of(unit, samples)
            told.__enter__()
            self._in_flight[number] = _Sent(unit, late, told)

    def _phase_of(self, unit: _Unit, samples: Sequence[Sample]) -> phase:
        """Name what is scored, for who looks at a reward that hangs."""
        assert self._process is not None
        section = samples[0].reward
        named = {"of": section} if section else {}
        function = terms_of(self._settings.sections[section])[unit.term].name
        more = {"samples": len(samples)} if len(samples) > 1 else {}
        response = f"{samples[0].response!r:.60}"
        return phase("score", reward=function, **named, **more, response=response, process=self._process.popen.pid)

    def _next_unit(self) -> _Unit | None:
        if len(self._in_flight) >= self._settings.concurrency or any(
            sent.unit.alone for sent in self._in_flight.values()
        ):
            return None
        if self._suspects:
            return None if self._in_flight else self._suspects.popleft()
        return self._queue.popleft() if self._queue else None

    def _answered(self, process: ScoringProcess, answer: Answer) -> None:
        if process is not self._process:
            return
        unit = self._in_flight.pop(answer.number).end()
        if answer.stuck:
            self._replace(process, FailureKind.timed_out, guilty=unit)
        else:
            self._settle(unit, answer.outcomes)
            self._send_what_fits()

    def _settle(self, unit: _Unit, outcomes: Sequence[Outcome]) -> None:
        """Take in what became of a unit's samples; those that are to be scored again go back into the queue."""
        job = unit.job
        for position, outcome in zip(unit.positions, outcomes, strict=True):
            if isinstance(outcome, Failure) and (again := self._again(unit, position, outcome)) is not None:
                (self._suspects if again.alone else self._queue).append(again)
            else:
                job.found[position, unit.term] = outcome
        if len(job.found) == job.calls and not job.done.done():
            self._jobs.discard(job)
            job.done.set_result(None)

    def _again(self, unit: _Unit, position: int, failure: Failure) -> _Unit | None:
        if len(unit.positions) > 1:
            return _Unit(unit.job, unit.term, [position]) if failure.kind in _OF_A_BATCH else None
        if failure.kind not in _MAY_PASS or failure.refused or unit.tries >= self._settings.retries:
            return None
        self._retries += 1
        return replace(unit, positions=[position], tries=unit.tries + 1)

    # What happens to the process.

    def _out_of_time(self, process: ScoringProcess, number: int) -> None:
        if process is self._process and number in self._in_flight:
            self._replace(process, FailureKind.timed_out, guilty=None)

    def _replace(self, process: ScoringProcess, kind: FailureKind, *, guilty: _Unit | None) -> None:
        """Kill the process and start another one.

        Args:
            guilty: the unit because of which, which is not in flight any more; None: one of those in flight.
        """
        others = [sent.end() for sent in self._in_flight.values()]
        self._in_flight.clear()
        self._process = None
        self._restarts += 1
        if guilty is None and len(others) == 1:
            guilty = others.pop()
        if guilty is not None:
            self._queue.extendleft(reversed(others))
        else:
            for unit in others:
                unit.alone = True
                self._suspects.append(unit)
        self._keep(self._renew(process, kind, guilty))

    async def _renew(self, process: ScoringProcess, kind: FailureKind, guilty: _Unit | None) -> None:
        stacks = await process.where() if kind is FailureKind.timed_out else ""
        ending = await process.end()
        if guilty is not None:
            lost = [self._lost(sample, guilty.term, kind, ending, stacks) for sample in guilty.samples]
            self._settle(guilty, lost)
        try:
            self._process = await self._start_process()
        except MegappoError as error:
            self._give_up(error)
            return
        self._send_what_fits()

    def _lost(self, sample: Sample, term: str, kind: FailureKind, ending: str, stacks: str) -> Failure:
        if kind is FailureKind.timed_out:
            return timed_out(sample, term, self._settings.timeout_s, details=stacks)
        text = f"{label_of(term)}: its process {ending}, response {sample.response!r:.200}"
        return Failure(kind=kind, message=text, details="what the process wrote is in its log")

    def _give_up(self, error: MegappoError) -> None:
        self._error = error
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(error)
        self._jobs.clear()

    async def _start_process(self) -> ScoringProcess:
        limits = self._settings
        settings = ProcessSettings(sections=limits.sections, concurrency=limits.concurrency, timeout_s=limits.timeout_s)
        process = await start_process(settings, timeout_s=limits.start_timeout_s)
        self._batched = process.batched
        self._keep(self._listen(process))
        return process

    async def _listen(self, process: ScoringProcess) -> None:
        """Take answers until the process ends."""
        while True:
            try:
                answer = await process.receive()
                assert isinstance(answer, Answer)
            except Exception:  # a process boundary: whatever else comes through the socket is no answer, either
                if process is self._process:
                    self._replace(process, FailureKind.died, guilty=None)
                return
            self._answered(process, answer)

    def _keep(self, work: Any) -> None:  # Any: the coroutine's own types don't matter
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
